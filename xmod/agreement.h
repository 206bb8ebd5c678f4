// What all ranks of a run must have alike: with other data or flags on some of them, they would train
// together what nobody has asked for.
#pragma once

#include <algorithm>
#include <cstdint>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "dataloader.h"
#include "xmod/communicator.h"
#include "xmod/config_json.h"
#include "xmod/fingerprint.h"
#include "xmod/flags.h"
#include "xmod/model.h"
#include "xmod/options.h"

namespace xmod {

using Fact = std::pair<std::string, std::string>;  // what, and how it is
using Facts = std::vector<Fact>;

// Every rank calls this with facts of the same names in the same order.
inline void require_same(Communicator& ranks, const Facts& facts) {
  std::string mine;
  for (const auto& [name, value] : facts) mine += value + '\n';
  const std::vector<std::string> all = ranks.gather(mine);
  for (size_t rank = 1; rank < all.size(); rank++) {
    std::istringstream first(all[0]), other(all[rank]);
    for (const auto& [name, value] : facts) {
      std::string expected, found;
      std::getline(first, expected);
      std::getline(other, found);
      if (found == expected) continue;
      fail(name, ": rank ", rank, " has ", found, ", rank 0 has ", expected,
           "; every process needs the same");
    }
  }
}

// Flags that ranks may have each its own way: where things lie, which are compared by what is in them, and
// how a rank computes.
inline bool may_differ(const std::string& flag) {
  static const std::set<std::string> flags = {"train-data", "val-data", "out",
                                              "init-from",  "threads",  "instructions"};
  return flags.count(flag) > 0;
}

// Of all the other flags of train.
inline Facts flag_facts(const Options& o) {
  Facts facts;
  for (const detail::Flag& flag : detail::flag_table()) {
    if (detail::of_command(flag, Command::train) && flag.show && !may_differ(flag.name))
      facts.emplace_back("--" + flag.name, flag.show(o));
  }
  return facts;
}

// validation: null where there is none.
inline void require_same_run(Communicator& ranks, const Options& o, const TokenShards& training,
                             const TokenShards* validation) {
  if (ranks.size() == 1) return;
  Facts facts = flag_facts(o);
  facts.emplace_back("--init-from", o.train.init_from.empty() ? "nothing" : "a checkpoint");
  facts.emplace_back("the model", config_to_json(o.model).dump());  // what no flag sets, too
  facts.emplace_back("--train-data", training.fingerprint());
  facts.emplace_back("--val-data", validation ? validation->fingerprint() : "none");
  require_same(ranks, facts);
}

// Of n numbers of the device.
template <class Backend, class Number>
uint64_t hash_of_device(Backend& be, const Number* device, int64_t n, uint64_t hash) {
  constexpr int64_t kPiece = int64_t{1} << 20;
  std::vector<Number> host(static_cast<size_t>(std::min(kPiece, n)));
  for (int64_t first = 0; first < n; first += kPiece) {
    const int64_t count = std::min(kPiece, n - first);
    be.to_host(host.data(), device + first, count);
    hash = hash_numbers(host.data(), count, hash);
  }
  return hash;
}

// Of each as all ranks have it: where they share out fp32 weights, in the format in which it is read, and
// without product_weights only of what every rank has by itself.
template <class Backend>
uint64_t hash_parameters(const Model<Backend>& model, bool product_weights = true) {
  Backend& be = model.backend();
  uint64_t hash = kHashStart;
  for (const Parameter& p : model.table.entries) {
    if constexpr (sizeof(typename Backend::floatX) < sizeof(float)) {
      if (!model.has_all_masters && p.read == Read::by_products_alone) {
        if (product_weights) hash = hash_of_device(be, model.product_weights() + p.offset, p.size, hash);
        continue;
      }
    }
    hash = hash_of_device(be, model.params() + p.offset, p.size, hash);
  }
  return hash;
}

// The ranks' weights are moved by the same arithmetic, and part where processors differ in it.
template <class Backend>
void require_same_weights(Communicator& ranks, const Model<Backend>& model, int64_t step,
                          bool product_weights = true) {
  if (ranks.size() == 1) return;
  require_same(ranks, {{detail::concatenate("the weights at step ", step),
                        show_hash(hash_parameters(model, product_weights))}});
}

}  // namespace xmod
