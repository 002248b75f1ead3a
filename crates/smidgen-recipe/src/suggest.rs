//! Hints for a refused key, value or line.
//!
//! A hint is given only if it is likely right: names of other trainers first, then the same name in another section,
//! then the nearest spelling. That something is wrong is decided in `parse.rs`.

use crate::foreign::{foreign_key_hint, foreign_names, foreign_word_hint};
use crate::keys::{KEYS, Key, SECTIONS, find_key};
use crate::mix::explain_refusal;
use crate::read::{explain_f32, unitless};
use crate::reasons::{Reason, reason_for};
use crate::sections::Recipe;
use crate::value::{Given, LARGEST_COUNT, Value};
use smidgen_ir::words::nearest;

/// Message and hint for an error of the TOML parser at the text `written`.
pub(crate) fn explain_syntax_error(message: &str, written: &str) -> (String, Option<String>) {
    let is_word = written.starts_with(|c: char| c.is_alphabetic());
    let starts_with_one_of = |starts: &[&str]| starts.iter().any(|start| message.starts_with(start));
    if message == "duplicate key" {
        (format!("`{written}` is set twice"), None)
    } else if ["True", "TRUE", "False", "FALSE"].contains(&written) {
        let hint = format!("write {}", written.to_lowercase());
        (format!("`{written}` is not a value"), Some(hint))
    } else if starts_with_one_of(&["string values must be quoted"]) && written.is_empty() {
        ("a value is missing after the `=`".to_owned(), None)
    } else if starts_with_one_of(&["string values must be quoted"])
        // The parser reports a word that begins like `true`, `inf` or `nan` as a misspelt one of these.
        || (is_word && starts_with_one_of(&["invalid boolean", "invalid float"]))
    {
        ("a string needs quotes".to_owned(), Some(format!("write {written:?}")))
    } else if starts_with_one_of(&[
        "invalid basic string, expected `\"`",
        "invalid literal string, expected `'`",
    ]) {
        ("the string has no closing quote".to_owned(), None)
    } else if starts_with_one_of(&["invalid mantissa", "invalid fraction", "invalid exponent"]) {
        let hint = "a decimal point needs digits on both sides, an exponent needs digits after it".to_owned();
        ("not a number".to_owned(), Some(hint))
    } else if starts_with_one_of(&["invalid unquoted key", "key with no value"]) {
        let hint = "a recipe is TOML: lines of `key = value` below a `[section]`".to_owned();
        (message.to_owned(), Some(hint))
    } else {
        (message.to_owned(), None)
    }
}

/// The hint for an unknown key.
pub(crate) fn suggest_key(section: &str, name: &str) -> Option<String> {
    if let Some(hint) = foreign_key_hint(section, name) {
        return Some(hint.to_owned());
    }
    let plain = name.to_lowercase().replace('-', "_");
    let names_of = |wanted: &str| {
        let wanted = wanted.to_owned();
        KEYS.iter().filter(move |key| key.section == wanted).map(|key| key.name)
    };
    let near_section = nearest(section, SECTIONS).unwrap_or(section);
    let exact = find_key(near_section, &plain).or_else(|| KEYS.iter().find(|key| key.name == plain));
    if exact.is_none()
        && let Reason { why, is_known: true } = reason_for(&plain)
    {
        let is_missing = why.starts_with("not supported");
        return Some(if is_missing { why } else { format!("remove it: {why}") });
    }
    let found =
        exact.or_else(|| find_key(near_section, nearest(&plain, names_of(near_section))?)).or_else(|| {
            let near = nearest(&plain, KEYS.iter().map(|key| key.name))?;
            KEYS.iter().find(|key| key.name == near)
        });
    match found {
        Some(key) => Some(format!("did you mean `{}`?", key.path())),
        None => {
            let near_foreign = nearest(&plain, foreign_names()).and_then(|near| foreign_key_hint("", near));
            match (near_foreign, SECTIONS.contains(&section)) {
                (Some(hint), _) => Some(hint.to_owned()),
                (None, true) => {
                    Some(format!("`[{section}]` has {}", listed(&names_of(section).collect::<Vec<_>>())))
                }
                (None, false) => None,
            }
        }
    }
}

/// The hint for an override without `=`.
pub(crate) fn suggest_override_key(text: &str) -> Option<String> {
    let (section, name) = text.split_once('.')?;
    find_key(section, name).map(|key| format!("it must be {}", key.accepts.describe()))
}

/// The hint for an override whose key is not of the form `section.key`, or is one of Hydra's.
pub(crate) fn suggest_override(path: &str) -> Option<String> {
    let plain = path.trim_start_matches(['+', '~']);
    if let Some((_, command)) = COMMAND_KEYS.iter().find(|(keys, _)| keys.contains(&plain)) {
        return Some((*command).to_owned());
    }
    if SECTIONS.contains(&plain) {
        let first = KEYS.iter().find(|key| key.section == plain && key.required);
        let names: Vec<&str> = KEYS.iter().filter(|key| key.section == plain).map(|key| key.name).collect();
        return Some(match first {
            Some(key) => format!("write `{}=...`", key.path()),
            None => format!("`[{plain}]` has {}", listed(&names)),
        });
    }
    let name = plain.rsplit('.').next().unwrap_or(plain);
    let hint = suggest_key("", name);
    match (plain != path || plain.matches('.').count() > 1, hint) {
        (true, Some(hint)) => {
            Some(format!("an override is `section.key=value`, without Hydra's `+` and groups; {hint}"))
        }
        (_, hint) => hint,
    }
}

/// Names under which scripts take what smidgen takes as its command.
const COMMAND_KEYS: &[(&[&str], &str)] = &[
    (
        &["cmd", "command", "mode", "action"],
        "the command comes first: `smidgen train RECIPE section.key=value`",
    ),
    (
        &["config", "config_name", "recipe", "cfg"],
        "the recipe comes after the command: `smidgen train RECIPE`",
    ),
    (&["hydra.run.dir", "hydra.sweep.dir"], "write `output.dir`"),
];

/// The hint for a refused value.
pub(crate) fn suggest_value(key: &Key, given: &Given<'_>) -> Option<String> {
    if let Some(refusal) = explain_refusal(&key.path(), given) {
        return Some(refusal);
    }
    let is_accepted = |value: &Value| (key.set)(&mut Recipe::with_defaults(), &given.with(value)).is_some();
    let word = match given.value {
        Value::Text(word) | Value::Bare(word) => word.clone(),
        Value::List(items) => match items.as_slice() {
            [Value::Text(word)] => word.clone(),
            _ => return None,
        },
        other => other.to_string(),
    };
    if word.contains(',') && !word.starts_with('[') && is_accepted(&Value::Bare(format!("[{word}]"))) {
        return Some(format!("write a list in brackets: `[{word}]`"));
    }
    if let Some(hint) = explain_f32(given) {
        return Some(hint);
    }
    if let Some(number) = unitless(given).filter(|number| is_accepted(&Value::Text(format!("{number}GiB"))))
        && ["budget", "host_budget", "peak"].contains(&key.name)
    {
        return Some(format!("it has no unit: write `{number}GiB` or `{number}MiB`"));
    }
    if let Some(hint) = foreign_word_hint(&key.path(), &word) {
        return Some(hint.to_owned());
    }
    match given.value {
        Value::Integer(number) if *number > LARGEST_COUNT && is_accepted(&Value::Integer(LARGEST_COUNT)) => {
            return Some(format!("the largest accepted number is {LARGEST_COUNT}"));
        }
        Value::Float(number) if number.fract() == 0.0 && is_accepted(&Value::Integer(*number as i128)) => {
            return Some(format!("write it without a decimal point: {}", *number as i128));
        }
        Value::Text(word) if is_accepted(&Value::Bare(word.clone())) => {
            return Some(format!("write it without quotes: {word}"));
        }
        _ => {}
    }
    if word.contains("://") && key.path() == "model.path" {
        return Some("write `hf:org/name` for a model on Hugging Face".to_owned());
    }
    let near = nearest(&word.to_lowercase().replace('_', "-"), key.accepts.words.iter().copied())?;
    // A hint that repeats the input would not help.
    (near != word).then(|| format!("did you mean `{near}`?"))
}

/// A value for a message, shortened if it is long.
pub(crate) fn abbreviate(value: &Value) -> String {
    const LONGEST: usize = 60;
    let text = value.to_string();
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

pub(crate) fn listed(names: &[&str]) -> String {
    format!("`{}`", names.join("`, `"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The arguments of TrainingArguments, SFTConfig, LoraConfig, BitsAndBytesConfig and FastLanguageModel, and the
    /// names that people use for the same settings in their own scripts.
    const COMMON: &str = "
        output_dir overwrite_output_dir do_train do_eval do_predict eval_strategy prediction_loss_only
        per_device_train_batch_size per_device_eval_batch_size per_gpu_train_batch_size per_gpu_eval_batch_size
        gradient_accumulation_steps eval_accumulation_steps eval_delay torch_empty_cache_steps learning_rate
        weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm num_train_epochs max_steps lr_scheduler_type
        lr_scheduler_kwargs warmup_ratio warmup_steps log_level log_level_replica log_on_each_node logging_dir
        logging_strategy logging_first_step logging_steps logging_nan_inf_filter save_strategy save_steps
        save_total_limit save_safetensors save_on_each_node save_only_model restore_callback_states_from_checkpoint
        no_cuda use_cpu use_mps_device seed data_seed jit_mode_eval use_ipex bf16 fp16 fp16_opt_level
        half_precision_backend bf16_full_eval fp16_full_eval tf32 local_rank ddp_backend tpu_num_cores
        tpu_metrics_debug debug dataloader_drop_last eval_steps dataloader_num_workers dataloader_prefetch_factor
        past_index run_name disable_tqdm remove_unused_columns label_names load_best_model_at_end
        metric_for_best_model greater_is_better ignore_data_skip fsdp fsdp_min_num_params fsdp_config
        accelerator_config parallelism_config deepspeed label_smoothing_factor optim optim_args adafactor
        group_by_length length_column_name report_to project trackio_space_id ddp_find_unused_parameters
        ddp_bucket_cap_mb ddp_broadcast_buffers dataloader_pin_memory dataloader_persistent_workers
        skip_memory_metrics use_legacy_prediction_loop push_to_hub resume_from_checkpoint hub_model_id hub_strategy
        hub_token hub_private_repo hub_always_push hub_revision gradient_checkpointing
        gradient_checkpointing_kwargs include_inputs_for_metrics include_for_metrics eval_do_concat_batches
        fp16_backend mp_parameters auto_find_batch_size full_determinism torchdynamo ray_scope ddp_timeout
        torch_compile torch_compile_backend torch_compile_mode include_tokens_per_second
        include_num_input_tokens_seen neftune_noise_alpha optim_target_modules batch_eval_metrics eval_on_start
        use_liger_kernel liger_kernel_config eval_use_gather_object average_tokens_across_devices
        model_init_kwargs chat_template_path dataset_text_field dataset_kwargs dataset_num_proc eos_token pad_token
        max_length max_seq_length packing packing_strategy padding_free pad_to_multiple_of eval_packing
        completion_only_loss assistant_only_loss loss_type activation_offloading num_of_sequences chars_per_token
        dataset_batch_size shuffle_dataset
        r target_modules exclude_modules lora_alpha lora_dropout fan_in_fan_out bias use_rslora modules_to_save
        init_lora_weights layers_to_transform layers_pattern rank_pattern alpha_pattern megatron_config
        megatron_core trainable_token_indices loftq_config eva_config corda_config use_dora use_qalora
        qalora_group_size layer_replication runtime_config lora_bias target_parameters arrow_config
        ensure_weight_tying task_type peft_type inference_mode base_model_name_or_path revision auto_mapping
        load_in_8bit load_in_4bit llm_int8_threshold llm_int8_skip_modules llm_int8_enable_fp32_cpu_offload
        llm_int8_has_fp16_weight bnb_4bit_compute_dtype bnb_4bit_quant_type bnb_4bit_use_double_quant
        bnb_4bit_quant_storage quant_method
        model_name dtype load_in_16bit full_finetuning token device_map rope_scaling fix_tokenizer
        trust_remote_code use_gradient_checkpointing resize_model_vocab use_exact_model_name offload_embedding
        float32_mixed_precision fast_inference gpu_memory_utilization float8_kv_cache random_state max_lora_rank
        disable_log_stats unsloth_vllm_standby finetune_vision_layers finetune_language_layers
        finetune_attention_modules finetune_mlp_modules temporary_location
        fourier_reg_weight init_sigma grad_accum num_workers pack_sequences bs wd accumulation_steps
        batch_size_per_gpu num_gpus world_size ctx_len eval_interval log_interval save_interval checkpoint_dir
        cache_dir hf_token use_amp ema system_prompt save_dir num_proc grad_clip_norm steps_per_print";

    #[test]
    fn every_name_in_common_use_has_an_answer() {
        let is_answered = |name: &&str| {
            let is_ours = KEYS.iter().any(|key| key.name == *name);
            is_ours || foreign_key_hint("", name).is_some() || reason_for(name).is_known
        };
        let unanswered: Vec<&str> = COMMON.split_whitespace().filter(|name| !is_answered(name)).collect();
        assert_eq!(unanswered, [] as [&str; 0]);
    }
}
