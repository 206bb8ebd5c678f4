// The layer kinds, as one family. A layer is an attention kind and a feed-forward kind, over all tokens or,
// in a sparse layer, over the selected ones; x += gate * (Attn(RMSNorm(x)) + FFN(RMSNorm(x + Attn))).
//
// A kind is one struct in one file of this directory, which supplies
//   parameters   add_parameters(): its tensors, whose offsets it keeps. An attention has its own norm before
//   it,
//                the norm before an FFN is the layer's
//   accounting   matrix_parameters(), matrix_parameters_per_token(); an attention also score_share() and
//                cache_share()
//   activations  Saved, carve_saved(): what a layer keeps for its backward pass;
//                Scratch, carve_scratch(): what all layers of the kind share
//   passes       forward in two halves, so that a layer can compute again what it did not keep
//   (xmod/activations.h,
//                Recompute): first all that is Saved, then what only the next layers need, the last product.
//                An attention: attend() fills x and Saved, from the stream and the keys that
//                ctx.keys_values() gives; project() writes delta. An FFN: activate() fills Saved; project()
//                adds to its output. backward(), with the stream as it was before the layer. An attention
//                adds to dx; an FFN writes or adds to the gradient of its input. An FFN also has
//                close_step(): what it moves behind a training step without a gradient
// and is listed below: in the enum, the variant and the switch. An FFN with experts has a step sum `loads` of
// config.experts numbers. An architecture puts kinds in order in make_layer_plan (xmod_common.h).
#pragma once

#include <cstdint>
#include <tuple>
#include <utility>
#include <variant>

#include "xmod/layers/deco.h"
#include "xmod/layers/moe.h"
#include "xmod/layers/selected_q.h"
#include "xmod/layers/self_attention.h"
#include "xmod/layers/swiglu.h"

namespace xmod {

// ---------------------------------------------------------------------------------------------------
// Absent parts

// routed-ffn: the sparse layers behind the attention that they share.
struct NoAttention {
  static int64_t matrix_parameters(const ModelConfig&) { return 0; }
  static double matrix_parameters_per_token(const ModelConfig&, double) { return 0; }
  static double score_share(double) { return 0; }
  static double cache_share(double) { return 0; }
  void add_parameters(TensorAdder, const ModelConfig&) {}

  template <class floatX>
  struct Saved {};
  template <class floatX>
  struct Scratch {};
  template <class floatX>
  Saved<floatX> carve_saved(Arena&, const ModelConfig&, int64_t, int64_t) const {
    return {};
  }
  template <class floatX>
  Scratch<floatX> carve_scratch(Arena&, const ModelConfig&, int64_t, bool) const {
    return {};
  }

  template <class Backend, class floatX>
  void attend(const LayerContext<Backend>& ctx, Saved<floatX>&, float* x, const Rows& rows) const {
    ctx.be.gather(x, ctx.stream, rows.row, rows.n, ctx.config.dim);
  }
  template <class Backend, class floatX>
  void project(const LayerContext<Backend>& ctx, const Saved<floatX>&, float* delta, const Rows& rows) const {
    ctx.be.zero(delta, rows.n * ctx.config.dim);
  }
  template <class Backend, class floatX>
  void backward(const LayerContext<Backend>&, const Saved<floatX>&, const Scratch<floatX>&, float*,
                const floatX*, const float*, const Rows&) const {}
};

// routed-ffn: that attention.
struct NoFfn {
  static int64_t matrix_parameters(const ModelConfig&) { return 0; }
  static double matrix_parameters_per_token(const ModelConfig&) { return 0; }
  void add_parameters(TensorAdder, const ModelConfig&) {}

  template <class floatX>
  struct Saved {};
  template <class floatX>
  struct Scratch {};
  template <class floatX>
  Saved<floatX> carve_saved(Arena&, const ModelConfig&, int64_t) const {
    return {};
  }
  template <class floatX>
  Scratch<floatX> carve_scratch(Arena&, const ModelConfig&, int64_t, bool) const {
    return {};
  }

  template <class Backend, class floatX>
  void activate(const LayerContext<Backend>&, Saved<floatX>&, const Scratch<floatX>&, const floatX*,
                int64_t) const {}
  template <class Backend, class floatX>
  void project(const LayerContext<Backend>&, const Saved<floatX>&, const Scratch<floatX>&, float*,
               int64_t) const {}
  template <class Backend, class floatX>
  void backward(const LayerContext<Backend>&, const Saved<floatX>&, const Scratch<floatX>&, Gradient, floatX*,
                const floatX*, const floatX*, int64_t) const {}
  template <class Backend>
  void close_step(const LayerContext<Backend>&, const ExpertLoads&) const {}
};

// ---------------------------------------------------------------------------------------------------
// The list

enum class Attention { none, self, selected_q };
enum class Ffn { none, swiglu, moe, deco };

using AttentionKind = std::variant<NoAttention, SelfAttention, SelectedQAttention>;
using FfnKind = std::variant<NoFfn, Swiglu, Moe, Deco>;

// Without tensors yet.
inline AttentionKind attention_kind(Attention attention) {
  switch (attention) {
    case Attention::none:
      break;
    case Attention::self:
      return SelfAttention{};
    case Attention::selected_q:
      return SelectedQAttention{};
  }
  return NoAttention{};
}

inline FfnKind ffn_kind(Ffn ffn) {
  switch (ffn) {
    case Ffn::none:
      break;
    case Ffn::swiglu:
      return Swiglu{};
    case Ffn::moe:
      return Moe{};
    case Ffn::deco:
      return Deco{};
  }
  return NoFfn{};
}

// ---------------------------------------------------------------------------------------------------
// What follows from the list: one layer's saved tensors, and the scratch of every kind.

namespace detail {

template <class Kinds, class floatX>
struct KindMemory;

template <class floatX, class... Kinds>
struct KindMemory<std::variant<Kinds...>, floatX> {
  using Saved = std::variant<typename Kinds::template Saved<floatX>...>;
  using Scratch = std::tuple<typename Kinds::template Scratch<floatX>...>;
};

}  // namespace detail

template <class Kinds, class floatX>
using SavedOf = typename detail::KindMemory<Kinds, floatX>::Saved;
template <class Kinds, class floatX>
using ScratchOf = typename detail::KindMemory<Kinds, floatX>::Scratch;

// Where a layer's loads lie among the step sums; -1: it has no experts.
inline int64_t loads_offset(const FfnKind& ffn) {
  auto offset = [](const auto& kind) -> int64_t {
    if constexpr (requires { kind.loads; }) return kind.loads;
    return -1;
  };
  return std::visit(offset, ffn);
}

// Calls visit(kind, its saved tensors, its scratch) with the kind that `kinds` holds.
template <class floatX, class Kinds, class Saved, class Scratch, class Visit>
void with_kind(const Kinds& kinds, Saved& saved, Scratch& scratch, Visit visit) {
  std::visit(
      [&](const auto& kind) {
        using Kind = std::decay_t<decltype(kind)>;
        visit(kind, std::get<typename Kind::template Saved<floatX>>(saved),
              std::get<typename Kind::template Scratch<floatX>>(scratch));
      },
      kinds);
}

}  // namespace xmod
