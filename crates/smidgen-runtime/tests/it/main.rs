//! Integration tests of the runtime: the results of every operation, tested from outside, through plans.
//!
//! `examples` is the list of operations; the files next to it have one family each. Others test whole decoders,
//! results that memory policies may not change, and plans that are broken on purpose.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod adapter_examples;
mod attention;
mod attention_examples;
mod audio_examples;
mod bf16_gradients;
mod broken_plans;
mod check;
mod cuda_agrees;
mod cuda_audio;
mod cuda_decode;
mod cuda_fp8;
mod cuda_kernels;
mod cuda_older;
mod cuda_plans;
mod cuda_shared_host;
mod decoder;
mod decoder_cache;
mod decoder_gradients;
mod decoder_kinds;
mod decoder_logits;
mod decoder_updates;
mod draft;
mod examples;
mod expert_examples;
mod finite_difference;
mod head_pieces_change_rounding;
mod linear_examples;
mod loss_examples;
mod matmul;
mod nccl_one_rank;
mod numbers;
mod objective_examples;
mod offload_changes_nothing;
mod optimizer8_fixtures;
mod packing_changes_rounding;
mod quant_fixtures;
mod ranks;
mod recompute_changes_nothing;
mod recurrence_examples;
mod row_examples;
mod row_matmul;
mod subject;
mod thread_counts;
mod tiles_change_rounding;
mod update_examples;
mod workspace_sizes;
