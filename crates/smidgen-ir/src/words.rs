//! The keywords that recipes and data share: one enum for each key whose value is one of a fixed list of words.
//!
//! Parsing, rendering, hints and the key reference all read [`ClosedWord::WORDS`], so a new word is one line here.
//! [`nearest`] finds the word that a mistyped one is most likely meant to be.
//! Left out: keys that mix words with numbers or lists (`memory.recompute`, `adapter.layers`).

use std::fmt;

/// A value that is one of a fixed list of words.
pub trait ClosedWord: Copy + Sized + 'static {
    /// As written in a recipe, in the order of the variants.
    const WORDS: &'static [&'static str];
    /// Every variant, in the same order.
    const ALL: &'static [Self];

    /// The word of this variant.
    fn word(self) -> &'static str;

    /// The variant of a word; case matters, as everywhere in a recipe.
    fn from_word(word: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|it| it.word() == word)
    }
}

/// The first of the nearest candidates, or `None` if all are far: at most a third of the letters (at least one) may
/// be inserted, deleted, replaced or swapped, because looser hints mislead more than they help.
pub fn nearest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let mut best: Option<(usize, &str)> = None;
    for candidate in candidates {
        let distance = strsim::osa_distance(word, candidate);
        let limit = (word.chars().count().max(candidate.chars().count()) / 3).max(1);
        if distance <= limit && best.is_none_or(|(least, _)| distance < least) {
            best = Some((distance, candidate));
        }
    }
    best.map(|(_, candidate)| candidate)
}

macro_rules! closed_words {
    ($($(#[$about:meta])* $name:ident { $($(#[$meaning:meta])* $variant:ident = $word:literal,)+ })+) => {$(
        $(#[$about])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum $name { $($(#[$meaning])* $variant,)+ }

        impl ClosedWord for $name {
            const WORDS: &'static [&'static str] = &[$($word),+];
            const ALL: &'static [Self] = &[$($name::$variant),+];

            fn word(self) -> &'static str {
                match self { $($name::$variant => $word,)+ }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.word())
            }
        }
    )+};
}

closed_words! {
    /// Storage format of the frozen weights in memory (`model.base`).
    BaseFormat {
        /// As in the checkpoint; a GGUF file keeps its blocks.
        AsStored = "as-stored",
        /// 32-bit floats.
        F32 = "f32",
        /// Brain floats.
        Bf16 = "bf16",
        /// Half floats.
        F16 = "f16",
        /// 8-bit floats (e4m3) with one scale per row.
        Fp8 = "fp8",
        /// 8-bit integers with one scale per row.
        Int8 = "int8",
        /// 4-bit normal floats with quantized scales (double quantization).
        Nf4 = "nf4",
        /// 4-bit normal floats, scales in f32.
        Nf4Single = "nf4-single",
    }

    /// Precision of matmuls and activations (`model.compute`).
    Compute {
        /// The best that the device supports.
        Auto = "auto",
        /// 32-bit floats.
        F32 = "f32",
        /// Brain floats.
        Bf16 = "bf16",
        /// Half floats, with dynamic loss scaling.
        F16 = "f16",
        /// bf16, with frozen linears in 8-bit floats (e4m3); changes results, and needs an RTX 40, L4, H100 or H200.
        Fp8 = "fp8",
    }

    /// What is trained (`adapter.kind`).
    AdapterKind {
        /// Scale alpha / rank.
        Lora = "lora",
        /// Scale alpha / sqrt(rank).
        RsLora = "rslora",
        /// Weight-decomposed: a magnitude per output row.
        Dora = "dora",
        /// Through a trained function with the regularizer `adapter.reg`, from the width `adapter.sigma`.
        LsLora = "ls-lora",
        /// The weights themselves.
        Full = "full",
    }

    /// Which biases are trained (`adapter.bias`).
    Bias {
        /// No bias.
        None = "none",
        /// Every bias of the model.
        All = "all",
        /// The biases of adapted linears.
        LoraOnly = "lora_only",
    }

    /// Format of the rows (`data.format`).
    DataFormat {
        /// Detected from the columns.
        Auto = "auto",
        /// `instruction`, `input`, `output`.
        Alpaca = "alpaca",
        /// The same columns, worded as the Alpaca prompt inside the user's turn.
        AlpacaPrompt = "alpaca-prompt",
        /// `messages` or `conversations`.
        Chat = "chat",
        /// `prompt` and `completion`.
        PromptCompletion = "prompt-completion",
        /// One `text`.
        Text = "text",
        /// `input_ids` and `labels`, or the ids that an objective needs.
        Tokens = "tokens",
        /// `prompt`, `chosen` and `rejected`, or `prompt`, `completion` and `label`.
        Preference = "preference",
    }

    /// Which tokens carry a loss (`data.loss_on`).
    LossOn {
        /// Every assistant turn in chat rows, every token in text rows, otherwise the completion.
        Auto = "auto",
        /// The answer that ends a sample.
        Completion = "completion",
        /// Every turn of the assistant.
        Assistant = "assistant",
        /// Every token.
        All = "all",
    }

    /// What a column holds (`data.columns`); the word is the name of the column in its format.
    ColumnRole {
        /// The prompt of a prompt-completion row.
        Prompt = "prompt",
        /// The completion of a prompt-completion row.
        Completion = "completion",
        /// The instruction of an alpaca row.
        Instruction = "instruction",
        /// What an instruction is about.
        Input = "input",
        /// The answer of an alpaca row.
        Output = "output",
        /// The system prompt.
        System = "system",
        /// Earlier turns of an alpaca row.
        History = "history",
        /// The turns of a chat row.
        Messages = "messages",
        /// The tools of a chat row.
        Tools = "tools",
        /// Variables for the chat template.
        ChatTemplateKwargs = "chat_template_kwargs",
        /// The text of a text row.
        Text = "text",
        /// The tokens of a tokens row.
        InputIds = "input_ids",
        /// The labels of a tokens row.
        Labels = "labels",
        /// The better answer of a preference row.
        Chosen = "chosen",
        /// The worse answer of a preference row.
        Rejected = "rejected",
        /// Whether the completion of a preference row is desirable.
        Label = "label",
    }

    /// What happens if rows cannot be used (`data.on_bad_row`).
    OnBadRow {
        /// All of them are reported, and the run is refused.
        Error = "error",
        /// They are skipped and counted.
        Skip = "skip",
    }

    /// What happens to a sample above `data.max_tokens` (`data.overflow`).
    Overflow {
        /// `chunk` for rows of text, `truncate` for all others.
        Auto = "auto",
        /// Its end is cut off.
        Truncate = "truncate",
        /// It is cut into pieces, each a sample.
        Chunk = "chunk",
        /// It is left out.
        Drop = "drop",
        /// The run is refused.
        Error = "error",
    }

    /// What happens to a clip above `data.max_audio_seconds` (`data.audio_overflow`).
    AudioOverflow {
        /// Its row is left out and counted.
        Drop = "drop",
        /// Its end is cut off, though the transcript stays whole.
        Trim = "trim",
    }

    /// What a step minimizes (`train.objective`).
    ObjectiveKind {
        /// The mean loss per supervised token.
        Sft = "sft",
        /// Direct preference optimization, on pairs.
        Dpo = "dpo",
        /// Odds ratio preference optimization, on pairs, without a reference.
        Orpo = "orpo",
        /// Contrastive preference optimization, on pairs, without a reference.
        Cpo = "cpo",
        /// `cpo` with `loss_type = "simpo"` and `cpo_alpha = 0`.
        Simpo = "simpo",
        /// Kahneman-Tversky optimization, on completions with a label.
        Kto = "kto",
        /// Group relative policy optimization, on answers with rewards.
        Grpo = "grpo",
    }

    /// The model that an objective compares with (`train.reference`).
    ReferenceUse {
        /// The base, or the start of the adapter where `adapter.init` names one.
        Auto = "auto",
        /// The base without adapters.
        Base = "base",
        /// The adapter as training finds it.
        Adapter = "adapter",
    }

    /// How log-probabilities of the reference come about (`memory.reference`).
    ReferenceMemory {
        /// `pass`, or `cached` where the base itself is trained.
        Auto = "auto",
        /// By a forward pass in every step.
        Pass = "pass",
        /// Computed once before the first step and kept in the run folder.
        Cached = "cached",
    }

    /// What rewards are divided by (`train.scale_rewards`).
    RewardScale {
        /// The standard deviation of the answers to the same prompt.
        Group = "group",
        /// That of all answers of the step.
        Batch = "batch",
        /// Nothing.
        None = "none",
    }

    /// How a generated answer is scored (`kind` of `[[train.reward]]`).
    RewardKind {
        /// It equals a column of the row.
        Exact = "exact",
        /// Its last number equals that of a column.
        Number = "number",
        /// A pattern is found in it.
        Regex = "regex",
        /// A pattern matches all of it.
        Format = "format",
        /// Its number of tokens is within bounds.
        Length = "length",
        /// It is JSON.
        Json = "json",
        /// A program of the user's says it.
        Command = "command",
    }

    /// What a probability ratio belongs to (`train.importance_sampling_level`).
    RatioLevel {
        /// A token.
        Token = "token",
        /// A whole answer.
        Sequence = "sequence",
    }

    /// Shape of the learning rate after warm-up (`train.schedule`).
    Schedule {
        /// Stays at `train.lr`.
        Constant = "constant",
        /// Falls to 0 in a straight line.
        Linear = "linear",
        /// Falls to 0 along half a cosine.
        Cosine = "cosine",
    }

    /// The optimizer (`train.optimizer`).
    Optimizer {
        /// AdamW with f32 moments.
        AdamW = "adamw",
        /// AdamW with moments in 8-bit blocks.
        AdamW8Bit = "adamw-8bit",
    }

    /// Trained weights of the base (`train.master`).
    Master {
        /// In f32, with a copy in the type of matmuls.
        F32 = "f32",
        /// In bf16, rounded at random after each update.
        Bf16 = "bf16",
    }

    /// What an evaluation measures (`eval.task`).
    EvalTask {
        /// Mean loss per supervised token.
        Loss = "loss",
        /// Accuracy over given choices.
        Choice = "choice",
        /// Match of generated answers.
        Generate = "generate",
        /// Word error rate of generated transcripts.
        Wer = "wer",
    }
}

impl BaseFormat {
    /// The format with this precision: matmuls in fp8 need weights in fp8.
    pub fn for_compute(self, compute: Compute) -> BaseFormat {
        match (self, compute) {
            (BaseFormat::AsStored, Compute::Fp8) => BaseFormat::Fp8,
            _ => self,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::nearest;

    #[test]
    fn near_and_far() {
        let words = ["rank", "alpha", "dropout"];
        assert_eq!(nearest("rnak", words), Some("rank"));
        assert_eq!(nearest("drop_out", words), Some("dropout"));
        assert_eq!(nearest("banana", words), None);
    }
}
