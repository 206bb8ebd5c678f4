// A model of a few thousand parameters, of each architecture.
#pragma once

#include "xmod_common.h"

namespace xmod {

inline ModelConfig small_config(Arch arch) {
  ModelConfig c;
  c.arch = arch;
  c.vocab_size = 61;
  c.dim = 24;
  c.active_layers = has_experts(arch) ? 3 : 5;
  c.heads = 4;
  c.kv_heads = 2;
  c.head_dim = 6;
  c.ffn_dim = 40;
  c.seq_len = 24;
  c.token_sparsity = 4;
  c.anchor_stride = 1;
  c.dense_prefix = 1;
  if (has_experts(arch)) {
    c.experts = 5;
    c.expert_dim = 12;
    c.shared_experts = 2;
  }
  if (arch == Arch::moe) c.experts_per_token = 2;
  if (arch == Arch::deco) c.entropy_weight = 0.5;  // so much that its gradient shows
  return c;
}

}  // namespace xmod
