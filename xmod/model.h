// The sequence of passes through the model, forward and backward, written once for every backend.
//
// A Backend supplies memory (allocate, release, zero, to_device, to_host) and the passes; the signatures,
// with the shape of every pointer, stand in train_xmod.cpp. Pass arguments are outputs first, then inputs,
// then sizes. Gradients of parameters are always added to; gradients of activations are written, except
// where a pass says that it adds.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "xmod/activations.h"
#include "xmod/device_buffer.h"
#include "xmod/options.h"
#include "xmod/rng.h"
#include "xmod_common.h"

namespace xmod {

// How a sparse layer selects its tokens.
enum class Routing {
  topk,       // the C best of each sequence; used to train
  threshold,  // all above the layer's threshold: causal; used to generate, and to evaluate beside top-k
};

template <class Backend>
class Model {
 public:
  using floatX = typename Backend::floatX;

  // Allocates for batches of up to max_batch sequences of up to config.seq_len tokens. Weights are zero until
  // initialise() or a checkpoint fills them. masters: the parts of params() that there are, none for all;
  // what else products need comes from other ranks, to product_weights().
  Model(Backend& backend, const ModelConfig& config, int64_t max_batch, Use use,
        Recompute recompute = Recompute::none, std::vector<NumberRange> masters = {})
      : config(config),
        recompute(recompute),
        plan(make_layer_plan(config)),
        table(make_parameter_table(config, plan)),
        sparse_layers(count_sparse(plan)),
        has_all_masters(masters.empty()),
        masters(has_all_masters ? std::vector<NumberRange>{{0, table.total}} : std::move(masters)),
        be_(backend),
        params_(backend, table.total, this->masters),
        grads_(backend, use == Use::training ? table.total : 0),
        buffers_(backend, table.buffers_total),
        step_sums_(backend, table.step_sums_total),
        rope_(backend, config.seq_len * config.head_dim),
        arena_(backend, arena_bytes<floatX>(config, max_batch, use, recompute)),
        max_batch_(max_batch),
        ctx_{be_,
             this->config,
             params_.data(),
             use == Use::training ? grads_.data() : nullptr,
             buffers_.data(),
             nullptr,
             rope_.data()} {
    for (const Buffer& b : table.buffers) be_.fill(buffers_.data() + b.offset, b.init, b.size);
    be_.rope_table(rope_.data(), config.seq_len, config.head_dim, config.rope_theta);
    if (use == Use::training) training_ = carve(use);
    inference_ = carve(Use::inference);
  }

  // README.md, "Init": every tensor from its own stream of the seed.
  void initialise(uint64_t seed) {
    constexpr int64_t kPiece = int64_t{1} << 16;
    std::vector<float> host(kPiece);
    for (const Parameter& p : table.entries) {
      const std::optional<double> constant = constant_init(p);
      for_each_master(p, [&](int64_t begin, int64_t end) {
        for (int64_t first = begin; first < end; first += kPiece) {
          const int64_t n = std::min(kPiece, end - first);
          if (constant) {
            std::fill_n(host.data(), n, static_cast<float>(*constant));
          } else {
            fill_normal(host.data(), n, init_std(p), seed, stream_of(p.name), first);
          }
          be_.to_device(params_.data() + p.offset + first, host.data(), n);
        }
      });
    }
  }

  // Calls visit(begin, end) for the elements of a parameter that are among this rank's masters.
  template <class Visit>
  void for_each_master(const Parameter& p, Visit visit) const {
    for (const NumberRange& part : masters) {
      const int64_t begin = std::max(part.offset - p.offset, int64_t{0});
      const int64_t end = std::min(part.offset + part.size - p.offset, p.size);
      if (begin < end) visit(begin, end);
    }
  }

  // Runs tokens (B, T) forward and backward under top-k routing; adds the gradient of
  // loss_scale * mean loss to grads() and returns the mean loss. Both inputs lie on the host.
  double forward_backward(const int32_t* tokens, const int32_t* targets, int64_t B, int64_t T,
                          float loss_scale) {
    start_batch(training_, tokens, targets, B, T);
    ctx_.step_sums = step_sums_.data();
    ctx_.dtoken = loss_scale / static_cast<float>(n_);
    auto step = [&] {
      forward_layers(Routing::topk);
      head_forward_backward(loss_scale);
      gradients_done(0);
      backward_layers();
      be_.add_row_means(step_sums_.data(), act_->kth_score, sparse_layers, B);
    };
    if (on_selection) {
      step();
    } else {
      be_.repeat(this, B, T, loss_scale, step);
    }
    if constexpr (Backend::kProcessor == Processor::gpu) follow_gradients();
    step_tokens_ += n_;
    return be_.mean(act_->losses, n_);
  }

  // Mean loss of tokens (B, T), forward only.
  double loss(const int32_t* tokens, const int32_t* targets, int64_t B, int64_t T, Routing routing) {
    start_batch(inference_, tokens, targets, B, T);
    forward_layers(routing);
    return head_forward();
  }

  // Logits of the rows first .. first + rows of tokens (1, T), to out (rows, V) on the host.
  void logits(float* out, const int32_t* tokens, int64_t T, int64_t first, int64_t rows, Routing routing) {
    start_batch(inference_, tokens, tokens, 1, T);
    forward_layers(routing);
    const int64_t d = config.dim;
    be_.rmsnorm_forward(act_->final_norm, act_->final_rstd, act_->stream, weight(table.final_norm), n_, d,
                        eps());
    write_logits(out, act_->final_norm + first * d, rows);
  }

  KeyValueCache<Backend> make_cache(int64_t B) const { return {be_, config, plan.size(), B}; }

  // Adds tokens behind the sequences of the cache: those of sequence b are tokens[offsets[b] ..
  // offsets[b+1]), on the host; up to config.seq_len for a sequence in all. Threshold routing. Writes the
  // logits (B, V) of each sequence's last token, on the host; those of a sequence without a new one mean
  // nothing.
  void extend(float* out, KeyValueCache<Backend>& cache, const int32_t* tokens,
              const std::vector<int64_t>& offsets) {
    start_extension(cache, tokens, offsets);
    forward_layers(Routing::threshold);
    const int64_t d = config.dim;
    std::vector<int32_t> last(static_cast<size_t>(B_));
    for (int64_t b = 0; b < B_; b++) {
      last[b] = static_cast<int32_t>(std::max<int64_t>(0, offsets[b + 1] - 1));
      cache.length[b] += static_cast<int32_t>(offsets[b + 1] - offsets[b]);
    }
    be_.to_device(act_->targets, last.data(), B_);
    be_.gather_rmsnorm_forward(act_->layers[0].x, act_->final_norm, act_->final_rstd, act_->stream,
                               weight(table.final_norm), act_->targets, B_, d, eps());
    write_logits(out, act_->final_norm, B_);
  }

  // Adds up what several ranks have counted since the last step: sum(values, n) sums over the ranks.
  template <class Sum>
  void sum_over_ranks(int64_t ranks, Sum sum) {
    std::vector<float> sums(static_cast<size_t>(table.step_sums_total));
    be_.to_host(sums.data(), step_sums_.data(), table.step_sums_total);
    sum(sums.data(), table.step_sums_total);
    be_.to_device(step_sums_.data(), sums.data(), table.step_sums_total);
    step_tokens_ *= ranks;
  }

  // Closes a training step: moves what training moves without a gradient, by the sums over its
  // micro-batches. step counts from 1. Returns the experts' loads.
  ExpertLoads close_step(int64_t step, int64_t micro_batches) {
    update_thresholds(step, micro_batches);
    const ExpertLoads loads = expert_loads();
    ctx_.step_sums = step_sums_.data();
    for (const LayerParameters& p : table.layers)
      std::visit([&](const auto& ffn) { ffn.close_step(ctx_, loads); }, p.ffn);
    be_.zero(step_sums_.data(), table.step_sums_total);
    step_tokens_ = 0;
    return loads;
  }

  // Gives products the weights as they are now, where they have been given others.
  void use_parameters() {
    if (!params_in_use_) be_.use_parameters(params_.data(), table.total, masters);
    params_in_use_ = true;
  }

  // (table.total) what products read in the place of the parameters that they alone read.
  floatX* product_weights() const { return be_.product_weights(params_.data(), table.total); }

  void zero_gradients() { be_.zero(grads_.data(), table.total); }

  // (table.total), of which `masters` are there. Who asks may write to them, so the next batch takes the
  // weights of its products anew.
  float* params() const {
    params_in_use_ = false;
    return params_.data();
  }
  float* grads() const { return grads_.data(); }         // (table.total)
  float* buffers() const { return buffers_.data(); }     // (table.buffers_total)
  float* thresholds() const { return buffers_.data(); }  // (sparse_layers) tau
  Backend& backend() const { return be_; }
  int64_t max_batch() const { return max_batch_; }
  // The last batch's intermediate tensors, on the device; layers() of a forward_backward batch only.
  const Activations<floatX>& activations() const { return *act_; }

  // When set, is told the rows that each sparse layer has just selected (routing analysis, tests).
  std::function<void(int64_t layer, const Rows& rows)> on_selection;

  // When set, is told that the backward pass is through with the gradients from `offset` on, and now and then
  // the same again: who moves them gets the time to.
  std::function<void(int64_t offset)> on_gradients;

  const ModelConfig config;
  const Recompute recompute;
  const LayerPlan plan;
  const ParameterTable table;
  const int64_t sparse_layers;
  const bool has_all_masters;
  const std::vector<NumberRange> masters;  // parts of params()

 private:
  static constexpr double kThresholdDecay = 0.99;

  Activations<floatX> carve(Use use) {
    Arena arena(arena_.data());
    return carve_activations<floatX>(arena, config, plan, table, max_batch_, config.seq_len, use, recompute);
  }

  std::optional<double> constant_init(const Parameter& p) const {
    switch (p.init) {
      case Init::ones:
        return 1;
      case Init::gate:
        return config.residual_gate_init;
      case Init::expert_scale:
        return 0.1;
      default:
        return std::nullopt;
    }
  }

  double init_std(const Parameter& p) const {
    const double fan_in = static_cast<double>(p.shape.back());
    switch (p.init) {
      case Init::embedding:
        return 0.02;
      case Init::matrix:
        return 1 / std::sqrt(fan_in);
      case Init::residual_matrix:
        return 1 / std::sqrt(fan_in * 2 * static_cast<double>(config.active_layers));
      case Init::router:
        return 0.5 / std::sqrt(fan_in);
      case Init::relu_router:
        return 0.01;
      default:
        return 0;
    }
  }

  float eps() const { return static_cast<float>(config.rms_norm_eps); }
  const float* weight(int64_t offset) const { return params_.data() + offset; }
  float* gradient(int64_t offset) const { return grads_.data() + offset; }
  bool gated(const LayerParameters& p) const { return p.residual_gate >= 0; }

  // --- forward ---

  void start_batch(Activations<floatX>& act, const int32_t* tokens, const int32_t* targets, int64_t B,
                   int64_t T) {
    act_ = &act;
    B_ = B, T_ = T, n_ = B * T, C_ = tokens_selected(config, T);
    be_.to_device(act.tokens, tokens, n_);
    be_.to_device(act.targets, targets, n_);
    be_.uniform_offsets(act.all_rows.offsets, B, T);
    start_rows(nullptr);
  }

  // New tokens of sequences that have begun: offsets (B+1) on the host.
  void start_extension(KeyValueCache<Backend>& cache, const int32_t* tokens,
                       const std::vector<int64_t>& offsets) {
    act_ = &inference_;
    B_ = cache.sequences(), n_ = offsets.back();
    be_.to_device(act_->tokens, tokens, n_);
    be_.to_device(act_->all_rows.offsets, offsets.data(), B_ + 1);
    be_.to_device(act_->times_selected, cache.length.data(), B_);  // until the first sparse layer
    start_rows(act_->times_selected);
    cache_ = &cache;
  }

  // position: (B) of each sequence's first row, or null: 0.
  void start_rows(const int32_t* position) {
    Rows& all = act_->all_rows;
    all.n = n_;
    use_parameters();
    be_.fill_sequence(all.row, n_);
    be_.fill_positions(all.position, all.offsets, position, B_);
    ctx_.B = B_;
    ctx_.all_rows = all;
    ctx_.stream = act_->stream;
    ctx_.dstream = act_->dstream;
    ctx_.step_sums = nullptr;
    cache_ = nullptr;
  }

  void forward_layers(Routing routing) {
    be_.encoder_forward(act_->stream, act_->tokens, weight(table.embed_tokens), n_, config.dim);
    for (size_t l = 0; l < plan.size(); l++) layer_forward(l, routing);
  }

  void layer_forward(size_t l, Routing routing) {
    const LayerParameters& p = table.layers[l];
    LayerActivations<floatX>& a = act_->layers[l];
    ctx_.cache = cache_ ? &cache_->layers[l] : nullptr;
    if (plan[l].routed) {
      select_rows(l, routing);
    } else {
      a.rows.n = n_;
    }
    attend(a, p);
    project_attention(a, p);
    if (plan[l].ffn != Ffn::none) {
      normalise_for_ffn(a, p);
      activate_ffn(a, p);
      project_ffn(a, p);
    }
    be_.gated_scatter_forward(act_->stream, a.delta, a.router_logit,
                              gated(p) ? weight(p.residual_gate) : nullptr, a.rows.row, a.rows.n, config.dim);
  }

  // Chooses the tokens of sparse layer l and keeps their router logits.
  void select_rows(size_t l, Routing routing) {
    const Layer& layer = plan[l];
    LayerActivations<floatX>& a = act_->layers[l];
    if (layer.depth_in_interval == 0) be_.zero(act_->times_selected, n_);
    const float* router = weight(table.layers[l].router);
    const float gamma = static_cast<float>(token_bias(config));
    const float expected =
        static_cast<float>(layer.depth_in_interval) / static_cast<float>(config.token_sparsity);
    if (routing == Routing::topk) {
      a.rows.n = B_ * C_;
      be_.route_topk(a.rows.row, a.rows.position, a.rows.offsets, a.router_logit,
                     act_->kth_score + layer.sparse_index * B_, act_->score, act_->selection_score,
                     act_->times_selected, act_->stream, router, act_->all_rows.position, gamma, expected, B_,
                     T_, C_, config.dim, eps());
    } else {
      be_.router_forward(act_->score, act_->stream, router, n_, config.dim, eps());
      be_.token_bias_forward(act_->selection_score, act_->score, act_->times_selected, gamma, expected, n_);
      a.rows.n = be_.select_threshold(a.rows.row, a.rows.offsets, act_->selection_score,
                                      thresholds() + layer.sparse_index, act_->all_rows.offsets, B_);
      be_.gather_ints(a.rows.position, act_->all_rows.position, a.rows.row, a.rows.n);
      be_.count_selected(a.router_logit, act_->times_selected, act_->score, a.rows.row, a.rows.n);
    }
    if (on_selection) on_selection(layer.number, a.rows);
  }

  // The parts of a layer, in their order. With h = x + Attn(RMSNorm(x)), delta becomes Attn(RMSNorm(x)), then
  // Attn(RMSNorm(x)) + FFN(RMSNorm(h)).

  void attend(LayerActivations<floatX>& a, const LayerParameters& p) {
    with_attention(a, p,
                   [&](const auto& kind, auto& saved, auto&) { kind.attend(ctx_, saved, a.x, a.rows); });
  }

  void project_attention(LayerActivations<floatX>& a, const LayerParameters& p) {
    with_attention(a, p,
                   [&](const auto& kind, auto& saved, auto&) { kind.project(ctx_, saved, a.delta, a.rows); });
  }

  void normalise_for_ffn(LayerActivations<floatX>& a, const LayerParameters& p) {
    be_.residual_rmsnorm_forward(a.h, a.ffn_norm, a.ffn_rstd, a.x, a.delta,
                                 weight(p.post_attention_layernorm), a.rows.n, config.dim, eps());
  }

  void activate_ffn(LayerActivations<floatX>& a, const LayerParameters& p) {
    with_ffn(a, p, [&](const auto& kind, auto& saved, auto& scratch) {
      kind.activate(ctx_, saved, scratch, a.ffn_norm, a.rows.n);
    });
  }

  void project_ffn(LayerActivations<floatX>& a, const LayerParameters& p) {
    with_ffn(a, p, [&](const auto& kind, auto& saved, auto& scratch) {
      kind.project(ctx_, saved, scratch, a.delta, a.rows.n);
    });
  }

  template <class Visit>
  void with_attention(LayerActivations<floatX>& a, const LayerParameters& p, Visit visit) {
    with_kind<floatX>(p.attention, a.attention, act_->scratch.attention, visit);
  }

  template <class Visit>
  void with_ffn(LayerActivations<floatX>& a, const LayerParameters& p, Visit visit) {
    with_kind<floatX>(p.ffn, a.ffn, act_->scratch.ffn, visit);
  }

  // Walks the rows in chunks so that only (logit_rows, V) logits exist; returns the mean loss.
  double head_forward() {
    const int64_t d = config.dim, V = config.vocab_size;
    be_.rmsnorm_forward(act_->final_norm, act_->final_rstd, act_->stream, weight(table.final_norm), n_, d,
                        eps());
    for (int64_t row = 0; row < n_; row += act_->logit_rows) {
      const int64_t count = std::min(act_->logit_rows, n_ - row);
      be_.matmul_forward(act_->logits, act_->final_norm + row * d, weight(table.lm_head), count, d, V);
      be_.crossentropy_forward(act_->losses + row, act_->logits, act_->targets + row, count, V);
    }
    return be_.mean(act_->losses, n_);
  }

  // The same with the backward pass of the head: leaves the losses and dstream.
  void head_forward_backward(float loss_scale) {
    const int64_t d = config.dim, V = config.vocab_size;
    const float dloss = loss_scale / static_cast<float>(n_);
    be_.rmsnorm_forward(act_->final_norm, act_->final_rstd, act_->stream, weight(table.final_norm), n_, d,
                        eps());
    for (int64_t row = 0; row < n_; row += act_->logit_rows) {
      const int64_t count = std::min(act_->logit_rows, n_ - row);
      be_.matmul_forward(act_->logits, act_->final_norm + row * d, weight(table.lm_head), count, d, V);
      be_.crossentropy_forward_backward(act_->losses + row, act_->logits, act_->targets + row, dloss, count,
                                        V);
      be_.matmul_backward(act_->dfinal + row * d, gradient(table.lm_head), act_->logits,
                          act_->final_norm + row * d, weight(table.lm_head), count, d, V);
    }
    be_.rmsnorm_backward(act_->dstream, gradient(table.final_norm), act_->dfinal, act_->stream,
                         weight(table.final_norm), act_->final_rstd, n_, d);
  }

  // out (rows, V) on the host, from the normalised rows inp (rows, d).
  void write_logits(float* out, const floatX* inp, int64_t rows) {
    const int64_t d = config.dim, V = config.vocab_size;
    std::vector<floatX> chunk(static_cast<size_t>(std::min(rows, act_->logit_rows) * V));
    for (int64_t row = 0; row < rows; row += act_->logit_rows) {
      const int64_t count = std::min(act_->logit_rows, rows - row);
      be_.matmul_forward(act_->logits, inp + row * d, weight(table.lm_head), count, d, V);
      be_.to_host(chunk.data(), act_->logits, count * V);
      std::copy(chunk.begin(), chunk.begin() + count * V, out + row * V);
    }
  }

  // --- backward ---

  void backward_layers() {
    ctx_.step_sums = nullptr;  // what is computed again has been counted
    for (size_t l = plan.size(); l-- > 0;) {
      layer_backward(l);
      gradients_done(static_cast<int64_t>(plan.size() - l));
    }
    be_.encoder_backward(gradient(table.embed_tokens), act_->dstream, act_->tokens, n_, config.vocab_size,
                         config.dim);
  }

  // A mark behind the head, and one behind each layer: gradients from here on are then final.
  int64_t marked_offset(int64_t mark) const {
    return mark == 0 ? table.final_norm : table.layers[plan.size() - static_cast<size_t>(mark)].begin;
  }

  void gradients_done(int64_t mark) {
    if (!on_gradients) return;
    if constexpr (Backend::kProcessor == Processor::cpu) {
      on_gradients(marked_offset(mark));
    } else {
      be_.mark(mark);
    }
  }

  // Waits for the device's marks, one by one.
  void follow_gradients() {
    if (!on_gradients) return;
    int64_t offset = table.total;
    for (int64_t mark = 0; mark <= static_cast<int64_t>(plan.size()); mark++) {
      while (!be_.passed(mark)) on_gradients(offset);
      on_gradients(offset = marked_offset(mark));
    }
  }

  void layer_backward(size_t l) {
    const LayerParameters& p = table.layers[l];
    LayerActivations<floatX>& a = act_->layers[l];
    const LayerScratch<floatX>& g = act_->scratch;
    if (restores_stream_) restore_stream(a);
    recompute_layer(l);
    be_.gated_scatter_backward(
        g.ddelta, g.dlogit, gated(p) ? gradient(p.residual_gate) : nullptr, act_->dstream, a.delta,
        a.router_logit, gated(p) ? weight(p.residual_gate) : nullptr, a.rows.row, a.rows.n, config.dim);
    if (plan[l].ffn != Ffn::none) {
      ffn_part_backward(a, p);
      if constexpr (Backend::kProcessor == Processor::cpu)
        gradients_done(static_cast<int64_t>(plan.size() - l) - 1);
    } else {
      be_.zero(g.dx, a.rows.n * config.dim);
    }
    with_attention(a, p, [&](const auto& kind, const auto& saved, const auto& scratch) {
      kind.backward(ctx_, saved, scratch, g.dx, g.ddelta, a.x, a.rows);
    });
    if (plan[l].routed) {
      be_.router_backward(g.dx, gradient(p.router), g.dlogit, a.x, weight(p.router), a.rows.n, config.dim,
                          eps());
    }
    be_.scatter_add(act_->dstream, g.dx, a.rows.row, a.rows.n, config.dim);
  }

  // Walks the stream back to what it was before the layer, which kept the rows that it then changed.
  void restore_stream(const LayerActivations<floatX>& a) {
    be_.scatter_rows(act_->stream, a.x, config.dim, a.rows.row, a.rows.n, config.dim);
  }

  // Whether a backward pass reads the stream itself and not only the layer's rows of it.
  static bool has_selected_q(const LayerPlan& plan) {
    return std::any_of(plan.begin(), plan.end(),
                       [](const Layer& layer) { return layer.attention == Attention::selected_q; });
  }

  // Computes what layer l did not keep, from the stream as it was before the layer. Its rows and their router
  // logits it kept: a selection is made once. Only a sparse layer's gate needs delta.
  void recompute_layer(size_t l) {
    const LayerParameters& p = table.layers[l];
    LayerActivations<floatX>& a = act_->layers[l];
    const bool has_ffn = plan[l].ffn != Ffn::none;
    if (recompute == Recompute::none) return;
    if (recompute == Recompute::block) {
      attend(a, p);
      if (has_ffn) {
        project_attention(a, p);
        normalise_for_ffn(a, p);
      }
    }
    if (has_ffn) activate_ffn(a, p);
    if (recompute == Recompute::block && plan[l].routed) project_ffn(a, p);
  }

  // From ddelta: the FFN's gradients; dx = d(h); ddelta += d(h), since h = x + delta before the FFN.
  void ffn_part_backward(LayerActivations<floatX>& a, const LayerParameters& p) {
    const LayerScratch<floatX>& g = act_->scratch;
    with_ffn(a, p, [&](const auto& kind, const auto& saved, const auto& scratch) {
      kind.backward(ctx_, saved, scratch, Gradient::write, g.dnorm, g.ddelta, a.ffn_norm, a.rows.n);
    });
    be_.residual_rmsnorm_backward(g.dx, g.ddelta, gradient(p.post_attention_layernorm), g.dnorm, a.h,
                                  weight(p.post_attention_layernorm), a.ffn_rstd, a.rows.n, config.dim);
  }

  // --- between steps ---

  // Moves every threshold tau towards the mean C-th largest score. The step-dependent rate is Adam's bias
  // correction, folded into the average.
  void update_thresholds(int64_t step, int64_t micro_batches) {
    const double rate = (1 - kThresholdDecay) / (1 - std::pow(kThresholdDecay, static_cast<double>(step)));
    be_.threshold_update(thresholds(), step_sums_.data(), static_cast<float>(1.0 / micro_batches),
                         static_cast<float>(rate), sparse_layers);
  }

  // Of the micro-batches since the last step.
  ExpertLoads expert_loads() {
    std::vector<float> sums(static_cast<size_t>(table.step_sums_total));
    if (has_experts(config.arch)) be_.to_host(sums.data(), step_sums_.data(), table.step_sums_total);
    std::vector<std::vector<float>> layers;
    for (const LayerParameters& p : table.layers) {
      const int64_t at = loads_offset(p.ffn);
      if (at >= 0) layers.emplace_back(sums.begin() + at, sums.begin() + at + config.experts);
    }
    return summarise_loads(layers, step_tokens_);
  }

  Backend& be_;
  DeviceBuffer<Backend, float> params_, grads_;
  DeviceBuffer<Backend, float> buffers_;    // (table.buffers_total)
  DeviceBuffer<Backend, float> step_sums_;  // (table.step_sums_total) of the running training step
  DeviceBuffer<Backend, float> rope_;       // (T, hd/2) cosines, then (T, hd/2) sines
  DeviceBuffer<Backend, unsigned char> arena_;
  int64_t max_batch_;
  mutable bool params_in_use_ = false;  // by the backend's products, as they are
  const bool restores_stream_ = recompute == Recompute::block || has_selected_q(plan);
  int64_t step_tokens_ = 0;  // trained on in the running step
  LayerContext<Backend> ctx_;
  Activations<floatX> training_, inference_;
  Activations<floatX>* act_ = nullptr;       // of the running batch
  KeyValueCache<Backend>* cache_ = nullptr;  // of the running batch
  int64_t B_ = 0, T_ = 0, n_ = 0, C_ = 0;    // of the running batch; C: tokens a sparse layer selects
};

}  // namespace xmod
