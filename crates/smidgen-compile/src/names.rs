//! Names by which the host finds inputs and state in a plan.
//!
//! Weights and adapters have the names of the checkpoint's tensors. Everything else that the host writes before a step or
//! reads after it is named here.

/// Names of the inputs that the host writes.
pub mod input {
    pub const IDS: &str = "ids";
    pub const POSITIONS: &str = "positions";
    pub const BOUNDARIES: &str = "boundaries";
    pub const ROWS: &str = "rows";
    pub const LABELS: &str = "labels";
    pub const DROPOUT_KEYS: &str = "dropout_keys";
    /// The dropout keys of the rows that carry a loss; exists if the head has an adapter.
    pub const DROPOUT_ROW_KEYS: &str = "dropout_row_keys";
    /// The dropout keys of audio rows; exists if the audio encoder has an adapter.
    pub const DROPOUT_AUDIO_KEYS: &str = "dropout_audio_keys";
    /// Normalized mel frames (8A, 80) of clips that are encoded.
    pub const AUDIO_FEATURES: &str = "audio_features";
    /// Audio rows (A, C) in the form that `AudioInput` names.
    pub const AUDIO_ROWS: &str = "audio_rows";
    /// For each audio row: number of mel frames, first row of its chunk, end of its chunk, first row of its clip.
    pub const AUDIO_MARKS: &str = "audio_marks";
    /// The token that each audio row replaces; -1 for a row that only pads a chunk.
    pub const AUDIO_TARGETS: &str = "audio_targets";
    /// 1 ÷ supervised tokens of the whole optimizer step.
    pub const LOSS_WEIGHT: &str = "loss_weight";
    /// Of an objective: the first supervised row of each sequence (G+1), and the numbers of each (G+1, 5).
    pub const SEQUENCE_ROWS: &str = "sequence_rows";
    pub const SEQUENCES: &str = "sequences";
    /// Of an objective: log-probabilities of rows before the updates and by the reference (S, 2).
    pub const ROWS_BEFORE: &str = "rows_before";
    /// Learning rate, number of the update counted from 1, and loss scale.
    pub const HYPER: &str = "hyper";
    /// Row of the caches for each position of each slot (L, P).
    pub const CACHE_TABLE: &str = "cache_table";
    /// The slot of each new token.
    pub const SLOTS: &str = "slots";
    /// For each new token the length of its sequence after the run; exists if a rotary embedding depends on the length.
    pub const LENGTHS: &str = "lengths";
}

/// Names of the state that the host reads.
pub mod state {
    /// Sum of the losses of the micro-steps so far; the host clears it before a step.
    pub const LOSS: &str = "loss";
    /// Loss, gradient norm, clip factor, 1 if finite.
    pub const REPORT: &str = "report";
    /// What the updates so far did to each trained leaf, one row per leaf in the order of the plan: the largest gradient
    /// after clipping, the largest parameter, 1 once an element has moved.
    pub const ACTIVITY: &str = "activity";
    /// Like [`ACTIVITY`], for updates on the host.
    pub const HOST_ACTIVITY: &str = "activity on the host";
    /// Summed negative log-likelihood of an evaluation; the host clears it before.
    pub const EVAL_LOSS: &str = "eval_loss";
    /// Negative log-likelihood of each supervised row of the last micro-batch (S), if requested.
    pub const ROW_LOSSES: &str = "row_losses";
    /// Sums of the figures that an objective reports; the host clears them before a step.
    pub const FIGURES: &str = "figures";
    /// Weighted negative log-likelihood that nothing reads: what `lm_head_loss` adds where an objective makes the loss.
    pub const UNREAD_LOSS: &str = "unread_loss";
    /// What LS-LoRA's regularizer adds to the loss of a step.
    pub const REG_LOSS: &str = "reg_loss";
    /// Logits of the chosen rows (S, V).
    pub const LOGITS: &str = "logits";
    /// Logits of the chosen rows of `decode` (S, V); other entry points overwrite them.
    pub const DECODED_LOGITS: &str = "decoded_logits";
    /// The audio rows of encoded clips (A, C).
    pub const AUDIO: &str = "audio";
}
