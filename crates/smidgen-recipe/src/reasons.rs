//! Why a setting of another tool has no counterpart in a recipe, by the name of the setting.
//!
//! There are three kinds of settings: what the plan decides (buffers, caches, micro-batches), what smidgen always does
//! (packing, attention), and what it does not support; the reasons of the last kind say that results will differ.
//! Names are compared as written, without the groups around them; a test checks that no name is listed twice.
//! A setting that is not listed gets the hint that a recipe would give for it, or is reported as unknown.

use crate::foreign::foreign_key_hint;

/// A reason, and whether the setting is known at all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reason {
    pub why: String,
    pub is_known: bool,
}

/// Why the setting with this name is not carried over.
pub fn reason_for(name: &str) -> Reason {
    let known = REASONS.iter().find(|(names, _)| names.contains(&name)).map(|(_, why)| *why);
    let prefixed = || PREFIXES.iter().find(|(prefix, _)| name.starts_with(prefix)).map(|(_, why)| *why);
    let hint = || foreign_key_hint("", name).map(|hint| hint.strip_prefix("remove it: ").unwrap_or(hint));
    match known.or_else(prefixed).or_else(hint) {
        Some(why) => Reason { why: why.to_owned(), is_known: true },
        None => Reason { why: "unknown setting".to_owned(), is_known: false },
    }
}

/// Whether a name is listed as written, such as an environment variable.
pub fn has_reason(name: &str) -> bool {
    REASONS.iter().any(|(names, _)| names.contains(&name))
}

pub const CHECKPOINTING: &str =
    "the solver recomputes only as many layers as `memory.budget` requires (pin it with `memory.recompute`)";
pub const SHARDING: &str = "configures sharding; each rank trains on a part of the samples of a step, and `memory.shard` says which state is \
                            divided over the ranks (default: the solver chooses)";
pub const SPLIT: &str =
    "the solver chooses how a step is split into micro-batches (pin it with `memory.micro_tokens`)";
const BUFFERS: &str = "sizes an allocator's buffers; here the plan is the allocation, and every buffer has its place before step 0";
const ALLOCATOR: &str = "tunes an allocator; there is none here, the plan is the allocation";
const CACHE: &str = "clears an allocator's cache; there is none here, nothing is allocated after start-up";
const OVERLAP: &str = "transfers are steps of the plan and overlap with compute automatically";
const FRAGMENTS: &str = "reduces fragmentation; a plan has none";
const LAUNCH: &str = "configures a launch of several processes; `smidgen train RECIPE --ranks N` starts those of one machine, \
                      `mpiexec`, `torchrun --no-python` or `srun` those of several";
const TRACKING: &str =
    "a run writes metrics.jsonl and TensorBoard files to `output.dir` and calls no other service";
const ATTENTION: &str = "there is one attention kernel, and it never builds a mask or a score matrix";
const PACKING: &str = "samples are always packed without padding and never attend to each other";
const KERNELS: &str = "smidgen has its own kernels; there is nothing to switch";
const LOADING: &str = "data is tokenized before the first step, on all threads (`memory.threads`)";
const MISSING: &str = "not supported; results will differ";
const CHECKPOINT: &str = "checkpoints are always complete, and adapters are saved as PEFT safetensors";
const TOKENS: &str = "the tokenizer is used as it is: no token is added, and its special tokens stay";
const RESUMING: &str = "`smidgen train --resume` continues a run";
const TELEMETRY: &str = "smidgen sends nothing about its use, so there is nothing to switch off";
const THREADS: &str = "`memory.threads` sets the threads, of the tokenizer too";
const PROFILING: &str = "metrics.jsonl has the time and memory of every step";
const UPLOAD: &str = "nothing is uploaded; upload the adapter from the run folder yourself";

/// Reasons for settings that begin with a prefix.
const PREFIXES: &[(&str, &str)] = &[
    ("wandb_", TRACKING),
    ("mlflow_", TRACKING),
    ("comet_", TRACKING),
    ("swanlab_", TRACKING),
    ("hub_", UPLOAD),
    ("push_to_hub", UPLOAD),
    ("ddp_", LAUNCH),
    ("dataloader_", LOADING),
    ("torch_compile", KERNELS),
    ("dynamo_", KERNELS),
    ("unsloth_", KERNELS),
    ("liger_", KERNELS),
    ("rope_", "positions come from the model's config"),
    ("galore_", MISSING),
    ("relora", MISSING),
    ("tpu_", LAUNCH),
    ("fp8_", "fp8 has one scale per row and per token, and no other settings (`model.compute = \"fp8\"`)"),
    ("vllm_", "configures generation during training, which is not supported"),
    ("include_", TRACKING),
];

/// Reasons for settings by name.
#[rustfmt::skip]
const REASONS: &[(&[&str], &str)] = &[
    (&["allgather_bucket_size", "reduce_bucket_size", "stage3_prefetch_bucket_size", "prefetch_bucket_size",
       "stage3_param_persistence_threshold", "param_persistence_threshold", "stage3_model_persistence_threshold",
       "model_persistence_threshold", "stage3_max_live_parameters", "max_live_parameters",
       "stage3_max_reuse_distance", "max_reuse_distance", "sub_group_size", "buffer_count", "buffer_size",
       "max_in_cpu", "ddp_bucket_cap_mb", "ratio", "min_num_params", "fsdp_min_num_params"], BUFFERS),
    (&["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "max_split_size_mb", "expandable_segments",
       "garbage_collection_threshold", "CUDA_LAUNCH_BLOCKING", "memory_fraction"], ALLOCATOR),
    (&["torch_empty_cache_steps", "empty_cache", "empty_cache_steps", "torch_empty_cache", "gc_steps",
       "clear_cache_steps"], CACHE),
    (&["device_map", "low_cpu_ram", "offload_embedding", "temporary_location", "mp_parameters"],
        "the plan places every tensor (`memory.budget`)"),
    (&["contiguous_gradients", "contiguous_memory_optimization", "round_robin_gradients", "fast_init",
       "use_multi_rank_bucket_allreduce"], FRAGMENTS),
    (&["overlap_comm", "reduce_scatter", "allgather_partitions", "communication_data_type", "pin_memory",
       "pipeline_read", "pipeline_write", "nvme_path", "offload_optimizer_nvme_path", "offload_param_nvme_path",
       "aio", "fsdp_backward_prefetch", "fsdp_forward_prefetch", "backward_prefetch", "forward_prefetch",
       "fsdp_backward_prefetch_policy", "limit_all_gathers", "fsdp_limit_all_gathers", "prescale_gradients",
       "gradient_predivide_factor", "sparse_gradients", "reuse_dist_env", "layered_summon",
       "synchronize_checkpoint_boundary", "zero_hpz_partition_size", "zero_quantized_weights",
       "zero_quantized_gradients", "use_all_reduce_for_fetch_params"], OVERLAP),
    (&["use_cache"], "caches keys and values for generation; training has no such cache"),
    (&["low_cpu_mem_usage", "_fast_init"],
        "weights are read straight into their places; there is never a second copy of the model in host memory"),
    (&["ddp_find_unused_parameters", "find_unused_parameters"],
        "ranks know from the plan which tensors get a gradient; none is searched for"),
    (&["max_memory"], "`memory.budget` is the memory of each device, `memory.host_budget` that of the host"),
    (&["HF_HUB_DISABLE_TELEMETRY", "DISABLE_TELEMETRY", "DO_NOT_TRACK", "ANONYMIZED_TELEMETRY", "UNSLOTH_DISABLE_STATISTICS",
       "AXOLOTL_DO_NOT_TRACK", "GRADIO_ANALYTICS_ENABLED", "disable_telemetry", "HF_HUB_DISABLE_PROGRESS_BARS"], TELEMETRY),
    (&["WANDB_PROJECT", "WANDB_API_KEY", "WANDB_MODE", "WANDB_DISABLED", "WANDB_WATCH", "WANDB_LOG_MODEL", "MLFLOW_TRACKING_URI",
       "COMET_MODE", "enable_wandb", "enable_tensorboard", "tensorboard_dir"], TRACKING),
    (&["TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS",
       "RAYON_NUM_THREADS", "tokenizers_parallelism", "num_threads", "torch_num_threads"], THREADS),
    (&["CUDA_VISIBLE_DEVICES"], "set it in the environment: it is obeyed, and `cuda:0` is the first of its devices"),
    (&["audio_gradient_checkpointing", "audio_encoder_gradient_checkpointing", "encoder_gradient_checkpointing",
       "encoder_activation_checkpointing", "gradient_checkpointing_audio_encoder", "checkpoint_audio_encoder"],
        "the blocks of the audio encoder are layers of the plan: `memory.recompute = \"all\"` includes them, and a frozen \
         encoder runs once, before the first step"),
    (&["inference", "temperature", "top_p", "top_k", "min_p", "max_new_tokens", "do_sample", "repetition_penalty"],
        "configures answers; `smidgen generate` takes it as an option"),
    (&["format_type"], "the format of the rows is detected (`data.format`)"),
    (&["use_loftq"], MISSING),
    (&["vision_all_linear"], "text models are trained"),
    (&["tiled_mlp", "tiled_mlp_num_shards"], "the solver chooses tiles of the feed-forward blocks (`memory.tile_tokens`)"),
    (&["stage", "zero_stage", "zero3_init_flag", "fsdp", "fsdp_config", "fsdp_version", "fsdp_sharding_strategy",
       "fsdp_reshard_after_forward", "reshard_after_forward", "sharding_strategy", "fsdp_auto_wrap_policy",
       "auto_wrap_policy", "fsdp_transformer_layer_cls_to_wrap", "transformer_layer_cls_to_wrap",
       "fsdp_use_orig_params", "fsdp_cpu_ram_efficient_loading", "cpu_ram_efficient_loading",
       "fsdp_sync_module_states", "sync_module_states", "use_orig_params", "partition_activations",
       "ignore_unused_parameters", "elastic_checkpoint", "zero_allow_untested_optimizer",
       "zero_force_ds_cpu_optimizer", "qlora_sharded_model_loading", "fsdp_final_state_dict_type",
       "tensor_parallel_size", "context_parallel_size", "sequence_parallel_degree", "dp_shard_size",
       "dp_replicate_size", "parallelism_config", "memory_efficient_linear", "mics_shard_size",
       "tensor_parallel_dim", "tensor_parallel_plan", "custom_sharded_layers", "tensor_model_parallel_size",
       "pipeline_model_parallel_size", "expert_model_parallel_size", "expert_parallel_size", "sequence_parallel", "cp_size",
       "use_distributed_optimizer", "leaf_module", "zero_module_granularity_threshold", "deepspeed_moe_layer_cls_names"], SHARDING),
    (&["compute_environment", "distributed_type", "num_machines", "machine_rank", "main_process_ip",
       "main_process_port", "main_training_function", "rdzv_backend", "same_network", "gpu_ids", "downcast_bf16",
       "enable_cpu_affinity", "deepspeed_multinode_launcher", "deepspeed_hostfile", "deepspeed_exclusion_filter",
       "deepspeed_inclusion_filter", "tpu_env", "command_file", "commands", "local_rank", "megatron_lm_config",
       "num_cpu_threads_per_process", "ray_scope", "ray_run_name", "ray_num_workers", "split_batches",
       "dispatch_batches", "accelerator_config", "sagemaker_config", "ipex_config", "nebius", "full_determinism",
       "use_cpu_affinity", "parallel_mode", "elasticity"], LAUNCH),
    (&["gradient_checkpointing", "gradient_checkpointing_kwargs", "activation_checkpointing",
       "fsdp_activation_checkpointing", "disable_gradient_checkpointing", "use_reentrant_gc",
       "use_unsloth_gc", "number_checkpoints", "use_reentrant", "use_gradient_checkpointing", "grad_checkpoint",
       "enable_activation_checkpointing"], CHECKPOINTING),
    (&["flash_attention", "flash_attn", "attn_implementation", "use_flash_attention_2", "sdp_attention",
       "xformers_attention", "s2_attention", "shift_attn", "eager_attention", "flex_attention", "sage_attention",
       "flash_attn_cross_entropy", "flash_attn_rms_norm", "flash_attn_fuse_mlp", "flash_attn_fuse_qkv"], ATTENTION),
    (&["sample_packing", "eval_sample_packing", "packing", "eval_packing", "packing_strategy", "neat_packing",
       "pad_to_sequence_len", "padding_free", "pad_to_multiple_of", "group_by_length", "train_sampling_strategy",
       "length_column_name", "sample_packing_bin_size", "sample_packing_group_size", "multipack_real_batches",
       "batch_flattening", "sample_packing_sequentially", "sample_packing_drop_attention_mask",
       "pad_to_max_length", "num_of_sequences", "chars_per_token"], PACKING),
    (&["per_device_eval_batch_size", "eval_batch_size", "eval_accumulation_steps", "auto_find_batch_size",
       "eval_on_start", "batch_size_val", "per_gpu_eval_batch_size", "eval_do_concat_batches", "batch_eval_metrics"], SPLIT),
    (&["report_to", "run_name", "logging_dir", "logging_strategy", "logging_first_step", "logging_nan_inf_filter",
       "use_wandb", "use_tensorboard", "plot_loss", "log_level", "log_level_replica", "log_on_each_node",
       "disable_tqdm", "project", "trackio_space_id", "trackio_bucket_id", "tensorboard", "wandb", "csv_monitor", "flops_profiler_config",
       "monitor_config", "trackio_static_space_id",
       "metric_logger", "log_every_n_steps", "disable_log_stats", "comms_config", "log_interval"], TRACKING),
    (&["steps_per_print"],
        "DeepSpeed's own lines on the console; `train.log_every` has the recipe's default"),
    (&["wall_clock_breakdown", "dump_state", "flops_profiler", "memory_breakdown", "profile", "profiler_steps",
       "skip_memory_metrics", "profiler_steps_start", "comms_logger", "log_num_input_tokens_seen",
       "log_peak_memory_stats", "tpu_metrics_debug", "profiler"], PROFILING),
    (&["dataset_num_proc", "dataset_processes", "preprocessing_num_workers", "dataset_prepared_path",
       "overwrite_cache", "preprocessing_batch_size", "tokenized_path", "dataset_keep_in_memory", "streaming",
       "dataset_streaming", "buffer_size_streaming", "skip_prepare_dataset", "dataset_kwargs", "buffer",
       "dataset_exact_deduplication", "dataset_shard_num", "remove_unused_columns", "dataset_batch_size", "num_workers",
       "prefetch_factor", "persistent_workers", "drop_last"], LOADING),
    (&["save_safetensors", "save_only_model", "save_on_each_node", "save_first_step", "stage3_gather_16bit_weights_on_model_save",
       "stage3_gather_fp16_weights_on_model_save", "gather_16bit_weights_on_model_save", "zero3_save_16bit_model",
       "fsdp_state_dict_type", "state_dict_type", "save_only_last", "save_merged", "checkpoint",
       "load_from_fp32_weights", "enable_jit_checkpoint", "restore_callback_states_from_checkpoint",
       "export_dir", "peft_autocast_adapter_dtype", "save_adapter_weights_only", "save_weights_only"], CHECKPOINT),
    (&["resume_from_checkpoint", "auto_resume_from_checkpoints", "ignore_data_skip"], RESUMING),
    (&["overwrite_output_dir"], "a folder that holds a run is never overwritten; `--resume` continues it"),
    (&["special_tokens", "tokens", "added_tokens_overrides", "new_special_tokens", "add_tokens", "resize_vocab",
       "eos_token", "pad_token", "tokenizer_type", "tokenizer_use_fast", "tokenizer_legacy", "use_fast_tokenizer",
       "add_special_tokens", "split_special_tokens", "tokenizer_config", "tokenizer_name", "default_system_message",
       "tool_format", "enable_thinking", "fix_tokenizer", "resize_model_vocab", "tokenizer", "eot_tokens", "vocab_path", "merges_path",
       "resize_token_embeddings_to_32x", "tokenizer_use_mistral_common", "add_bos_token",
       "add_eos_token"], TOKENS),
    (&["use_liger_kernel", "enable_liger_kernel", "use_unsloth", "lora_mlp_kernel", "lora_qkv_kernel",
       "lora_o_kernel", "torch_compile", "plugins", "upcast_layernorm", "upcast_lmhead_output",
       "experts_implementation", "liger_kernel_config", "cut_cross_entropy", "use_kernels",
       "tf32", "is_llama_derived_model", "is_mistral_derived_model", "is_falcon_derived_model", "bf16_full_eval",
       "fp16_full_eval", "fp16_opt_level", "half_precision_backend", "jit_mode_eval", "infer_dtype",
       "fused_attn_kernel", "use_scattermoe", "use_sonicmoe", "use_v1_kernels",
       "flex_attn_compile_kwargs", "batching_strategy", "float32_logits", "use_mps_device", "compile", "amp", "data_types", "use_ipex", "fp16_backend",
       "optimizer_in_bwd", "seq_parallel_communication_data_type", "use_amp", "float32_mixed_precision",
       "llm_int8_threshold", "llm_int8_skip_modules", "llm_int8_has_fp16_weight", "xformers", "triton"], KERNELS),
    (&["neftune_noise_alpha", "noisy_embedding_alpha", "label_smoothing_factor", "loraplus_lr_ratio",
       "loraplus_lr_embedding", "embedding_lr", "embedding_lr_scale", "lr_groups", "use_dft_loss",
       "use_eaft_loss", "router_aux_loss_coef", "mixture_of_depths", "rpo_alpha", "pissa_init", "pissa_iter",
       "pissa_convert", "loftq_config", "use_galore", "use_apollo", "use_badam", "use_adam_mini", "use_muon",
       "use_llama_pro", "adam_beta3", "adam_epsilon2", "lisa_n_layers", "lisa_step_interval",
       "lisa_layers_attr", "optim_args", "optim_target_modules", "lora_target_parameters", "target_parameters",
       "layer_replication", "trainable_token_indices", "peft_layer_replication", "peft_trainable_token_indices",
       "loss_type", "curriculum_sampling", "data_efficiency", "curriculum_learning", "progressive_layer_drop",
       "compression_training", "sparse_attention", "eva_config", "corda_config", "arrow_config",
       "exclude_modules", "lora_bias", "unfrozen_parameters", "freeze_mm_modules",
       "use_mixup", "interleave_probs", "mix_strategy", "rl", "reward_model", "lr_quadratic_warmup",
       "cosine_constant_lr_ratio", "lora_ga_config", "qalora_group_size", "use_qalora", "alora_invocation_tokens",
       "lr_div_factor", "chat_template_kwargs", "roles", "reft_config", "train_on_eos", "freeze_step", "cuda_aware",
       "comm_backend_name", "use_asft_loss", "asft_alpha", "use_eaft", "eaft_alpha", "eaft_k", "reinit_weights", "min_sample_len", "gptq",
       "loss_watchdog_threshold", "loss_watchdog_patience", "ema", "use_ema", "adafactor",
       "label_smoothing", "lora_plus", "rslora_alpha", "distillation", "mixup"], MISSING),
    (&["trust_remote_code", "trust_remote_code_revision"], "code from a model is never run"),
    (&["max_samples", "max_train_samples"], "write `data.limit`, the rows used of each source"),
    (&["do_train", "do_eval", "do_predict", "prediction_loss_only", "predict_with_generate", "strict",
       "is_preprocess", "shuffle_before_merging_datasets", "debug", "greater_is_better", "metric_for_best_model",
       "label_names", "past_index", "ignore_bias_buffers", "average_tokens_across_devices", "dataset_config",
       "gradient_accumulation_kwargs", "jobs", "torchdynamo", "use_legacy_prediction_loop", "warnings_issued"],
        "there is nothing to switch"),
    (&["lr_scheduler_kwargs"], "schedules have no settings other than `train.warmup`"),
    (&["load_best_model_at_end"],
        "the best evaluated state is kept; with `train.early_stop` it becomes the adapter"),
    (&["chat_template_path"], "`data.template` takes a .jinja file or a built-in name"),
    (&["model_init_kwargs"], "`model.base` and `model.compute` set the precision of the weights and of the arithmetic"),
    (&["base_model_name_or_path", "revision"], "`model.path` names the model: `hf:org/name@revision`"),
    (&["load_in_16bit"], "weights stay as stored (`model.base`)"),
    (&["fast_inference", "max_lora_rank", "float8_kv_cache", "finetune_vision_layers", "num_generations"],
        "text models are trained, and nothing is generated during training"),
    (&["finetune_language_layers", "finetune_attention_modules", "finetune_mlp_modules"],
        "`adapter.targets` names the linear layers that are adapted"),
    (&["full_finetuning"], "`adapter.kind = \"full\"` trains the base weights"),
    (&["use_exact_model_name"], "`model.path` is used as written"),
    (&["cache_dir", "hf_token", "token", "hf_home"],
        "models are kept in Hugging Face's cache; `HF_HOME` and `HF_TOKEN` are read from the environment"),
    (&["system_prompt"], "a system message is part of a row"),
    (&["eval_delay", "eval_use_gather_object", "test_split_size"],
        "an evaluation runs every `train.eval_every` steps on the rows of `data.eval`"),
    (&["quant_method"], "`model.base` quantizes the way bitsandbytes does it"),
    (&["world_size", "nproc_per_node", "nnodes", "num_gpus", "n_gpu", "num_nodes"], LAUNCH),
    (&["test_datasets_split", "dataset_train_split", "dataset_test_split", "dataset_config_name"],
        "selects a part of a hub dataset; write `hf:org/name/config:split`"),
    (&["val_set_size", "val_size", "eval_split_ratio"],
        "write `data.split`, the share of the training rows that is evaluated"),
    (&["task_type", "lora_task_type", "auto_mapping", "inference_mode", "peft_version", "fan_in_fan_out",
       "lora_fan_in_fan_out", "megatron_config", "megatron_core", "model_type", "type_of_model",
       "base_model_config", "runtime_config", "ensure_weight_tying", "peft_ensure_weight_tying",
       "layers_pattern", "peft_layers_pattern", "lora_on_cpu"],
        "determined by the model; only causal language models are supported"),
    (&["loss_scale", "loss_scale_window", "initial_scale_power", "hysteresis", "min_loss_scale",
       "consecutive_hysteresis", "auto_cast", "bf16_master_weights_and_grads", "bf16_optimizer_states",
       "immediate_grad_update"],
        "f16 uses its own dynamic loss scaling, and bf16 needs none"),
    (&["modules_to_save", "lora_modules_to_save", "additional_target"],
        "`adapter.train` names parts of the base that are trained with an adapter"),
    (&["torch_dtype_storage", "bnb_4bit_quant_storage", "bnb_4bit_compute_dtype"],
        "weights are decoded inside the matmul, in the precision of `model.compute`"),
];

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn every_name_has_one_reason() {
        let mut seen = HashSet::new();
        for name in REASONS.iter().flat_map(|(names, _)| names.iter()) {
            assert!(seen.insert(name), "`{name}` is listed twice");
        }
    }

    #[test]
    fn reasons_are_for_people() {
        assert!(reason_for("reduce_bucket_size").why.contains("the plan is the allocation"));
        assert!(reason_for("wandb_project").why.contains("metrics.jsonl"));
        // A hint from `foreign.rs`.
        assert!(reason_for("use_double_quant").why.contains("nf4"));
        assert!(!reason_for("flux_capacitor").is_known);
    }
}
