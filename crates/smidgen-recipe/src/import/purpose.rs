//! Files that do not describe supervised fine-tuning of a text model, whatever their tool.
//!
//! A preference, a reward, a picture or a prediction shows in a key or in its value. One row below is one such sign;
//! the import refuses the file and names the sign, because the rest of such a file reads like fine-tuning.
//! Signs that only one tool can give (a component of torchtune, a stage of LLaMA-Factory) are in that tool's file.

use super::document::{Content, Entry};
use super::mistakes::Mistakes;

/// Which value of a key is a sign.
enum When {
    /// Any value but null, false, zero and nothing.
    On,
    /// A text with one of these parts, in lower case.
    Has(&'static [&'static str]),
    /// A text that begins with one of these, in lower case.
    Begins(&'static [&'static str]),
}

use When::{Begins, Has, On};

const REWARD: &str = "a reward model";
const PREFERENCE: &str = "training on preferences or rewards";
const CLASSIFIER: &str = "a classifier";
const IMAGES: &str = "a model of images, video or sound";
const SPEECH: &str = "a model of speech";
const EMBEDDING: &str = "an embedding model";
const DIFFUSION: &str = "a diffusion model";
const DISTILLATION: &str = "distillation";
const QAT: &str = "quantization-aware training";
const ENCODER: &str = "a model that is no decoder";

/// Classes of Transformers, as values of `model_type`, `auto_model` and others.
const CLASSES: &[(&[&str], &str)] = &[
    (
        &["forsequenceclassification", "fortokenclassification", "rewardmodel", "forquestionanswering"],
        CLASSIFIER,
    ),
    (&["imagetexttotext", "forvision2seq", "llava", "pixtral", "mllama"], IMAGES),
    (&["speechseq2seq", "whisper", "forctc"], SPEECH),
    (&["formaskedlm", "seq2seqlm", "t5for"], ENCODER),
    (&["sentencetransformer"], EMBEDDING),
];

/// Keys, the value that is a sign, and what the file is about.
#[rustfmt::skip]
const SIGNS: &[(&[&str], When, &str)] = &[
    (&["reward_model", "process_reward_model", "center_rewards_coefficient"], On, REWARD),
    (&["rl", "rl_beta", "orpo_alpha", "dpo_alpha", "kto_desirable_weight", "kto_undesirable_weight", "simpo_gamma",
       "cpo_alpha", "pref_beta", "pref_loss", "pref_ftx", "ref_model", "ref_model_name_or_path", "reward_funcs",
       "reward_weights", "reward_model_path", "reward_model_name_or_path", "reward_func", "ppo_config", "ppo_epochs",
       "num_ppo_epochs", "cliprange", "kl_coef", "dpo_beta", "dpo_config", "grpo_config", "kto_config", "orpo_config",
       "dpo_trainer", "num_generations", "max_prompt_length", "desirable_weight", "undesirable_weight",
       "precompute_ref_log_probs", "label_smoothing_dpo", "sft_model_path", "ebft"], On, PREFERENCE),
    (&["trainer_type", "trainer", "method", "training_method", "algorithm", "train_method", "training_type", "rlhf_type",
       "alignment", "loss_type"],
        Begins(&["dpo", "orpo", "kto", "ppo", "grpo", "gspo", "rloo", "simpo", "cpo", "ipo", "rlhf", "online_dpo", "reinforce",
                 "dapo"]), PREFERENCE),
    (&["trainer_type", "method", "training_method", "train_method"], Begins(&["reward"]), REWARD),
    (&["type"], Begins(&["bradley_terry", "stepwise_supervised"]), REWARD),
    (&["type"], Begins(&["orpo", "dpo", "kto", "ipo", "ebft_", "rwd."]), PREFERENCE),
    (&["type"], Has(&[".argilla", ".ultra", ".intel", ".prompt_pairs", ".icr"]), PREFERENCE),
    (&["num_labels", "id2label", "problem_type", "classification_type", "classifier_dropout"], On, CLASSIFIER),
    (&["task_type", "lora_task_type"], Begins(&["seq_cls", "token_cls", "question_ans"]), CLASSIFIER),
    (&["task_type", "lora_task_type"], Begins(&["seq_2_seq"]), ENCODER),
    (&["task_type", "lora_task_type"], Begins(&["feature_extraction"]), EMBEDDING),
    (&["mlm", "mlm_probability"], On, ENCODER),
    (&["processor_type", "image_size", "image_resize_algorithm", "image_max_pixels", "image_min_pixels", "video_max_pixels",
       "video_fps", "vision_tower", "mm_projector_type", "vision_all_linear", "image_column", "image_folder", "is_vision",
       "freeze_vision_tower", "train_vision_tower", "freeze_multi_modal_projector"], On, IMAGES),
    (&["pretrained_vae_model_name_or_path", "unet_lr", "train_text_encoder", "instance_prompt", "instance_data_dir",
       "noise_scheduler", "noise_schedule", "num_diffusion_steps", "diffusion", "prior_loss_weight", "snr_gamma"],
        On, DIFFUSION),
    (&["audio_type", "audio_input", "audio_column_name", "audio_column", "freeze_feature_encoder", "feature_extractor_name",
       "is_whisper", "mask_time_prob"], On, SPEECH),
    (&["task"], Begins(&["transcribe", "translate", "automatic-speech"]), SPEECH),
    (&["wandb_project"], Begins(&["embedding-finetuning"]), EMBEDDING),
    (&["matryoshka_dims", "pooling_mode", "is_embedding", "embedding_model", "temperature_infonce", "sentence_transformers"],
        On, EMBEDDING),
    (&["teacher_model", "teacher_model_name_or_path", "kd_trainer", "kd_alpha", "kd_ce_alpha", "kd_temperature", "kd_loss",
       "kd_ratio", "distill_config", "gkd"], On, DISTILLATION),
    (&["train_dataset"], Has(&["dpo", "kto", "reward"]), PREFERENCE),
    (&["train_dataset"], Has(&["multimodal", "mllm"]), IMAGES),
    (&["plugins"], Has(&["diffusionplugin"]), DIFFUSION),
    (&["plugins"], Has(&["kdplugin"]), DISTILLATION),
    (&["qat"], On, QAT),
];

/// Notes every sign in the file: at the top, in groups and in lists of groups. Settings in `allowed` are those of an
/// objective that the file trains, and so are types of rows.
pub fn refuse_other_purposes(entries: &[Entry], mistakes: &Mistakes, allowed: &[&str]) {
    for entry in entries {
        let name = entry.name.as_str();
        let is_allowed = allowed.contains(&name) || (!allowed.is_empty() && name == "type");
        if is_allowed {
            continue;
        }
        if let Some(what) = purpose_of(entry) {
            let value = entry.value.content.describe();
            let message = format!(
                "`{}` is {value}: this is {what}; only supervised fine-tuning is supported",
                entry.name
            );
            mistakes.note(entry.line, message);
            continue;
        }
        match &entry.value.content {
            Content::Map(inside) => refuse_other_purposes(inside, mistakes, allowed),
            Content::List(items) => {
                for item in items {
                    if let Content::Map(inside) = &item.content {
                        refuse_other_purposes(inside, mistakes, allowed);
                    }
                }
            }
            _ => {}
        }
    }
}

/// What a setting says about the file, unless it fits fine-tuning.
fn purpose_of(entry: &Entry) -> Option<&'static str> {
    let content = &entry.value.content;
    let row =
        SIGNS.iter().find(|(keys, when, _)| keys.contains(&entry.name.as_str()) && is_met(content, when));
    row.map(|(.., what)| *what).or_else(|| {
        let keys =
            ["model_type", "auto_model", "auto_model_class", "model_class", "architecture", "architectures"];
        let class = |(parts, _): &&(&'static [&'static str], _)| is_met(content, &Has(parts));
        CLASSES.iter().filter(|_| keys.contains(&entry.name.as_str())).find(class).map(|(_, what)| *what)
    })
}

fn is_met(content: &Content, when: &When) -> bool {
    match (content, when) {
        (Content::List(items), Has(_) | Begins(_)) => items.iter().any(|item| is_met(&item.content, when)),
        (Content::Text(text), Has(parts)) => {
            let text = text.to_lowercase();
            parts.iter().any(|part| text.contains(part))
        }
        (Content::Text(text), Begins(beginnings)) => {
            let text = text.to_lowercase();
            beginnings.iter().any(|beginning| text.starts_with(beginning))
        }
        (_, Has(_) | Begins(_)) | (Content::Null | Content::Boolean(false), On) => false,
        (Content::Text(text), On) => {
            !["", "no", "none", "false", "null"].contains(&text.to_lowercase().as_str())
        }
        (Content::Number(digits), On) => digits.parse::<f64>().is_ok_and(|number| number != 0.0),
        (Content::List(items), On) => items.iter().any(|item| item.content != Content::Null),
        (Content::Map(entries), On) => !entries.is_empty(),
        (Content::Boolean(true), On) => true,
    }
}
