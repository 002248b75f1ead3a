//! The attributes of operations that are more than a number: activations, attention, norms, optimizers, random places.
//!
//! The op table (`op.rs`) has the operations themselves, and takes from here what does not fit its rows. The attributes of
//! the loss, of rotary embeddings and of operations on sound are in their own files.

use crate::loss_head::cap_text;
use crate::rank::Rank;
use std::fmt;

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    Silu,
    GeluTanh,
    /// GELU by the error function.
    Gelu,
    /// The gate is a share of up, not an activation.
    Sigmoid,
    /// The gate itself: the product of two activations.
    Identity,
    /// min(gate, limit)·sigmoid(alpha·min(gate, limit)), and up is clamped to ±limit, plus 1.
    ClampedSwiglu {
        limit: f32,
        alpha: f32,
    },
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub scale: f32,
    /// Most keys that a query sees, its own included; `None` means all keys up to its own.
    pub window: Option<usize>,
    /// Scores s become cap·tanh(s/cap).
    pub softcap: Option<f32>,
    /// The softmax of each query has one more score, the sink of its head, which belongs to no key.
    pub sinks: bool,
}

impl AttentionShape {
    /// Channels of a query row and of a key or value row.
    pub fn channels(&self) -> (usize, usize) {
        (self.heads * self.head_dim, self.kv_heads * self.head_dim)
    }
}

impl fmt::Display for AttentionShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let AttentionShape { heads, kv_heads, head_dim, scale, window, softcap, sinks } = self;
        let window = window.map(|keys| format!(" window={keys}")).unwrap_or_default();
        let sinks = if *sinks { " sinks" } else { "" };
        write!(
            f,
            "heads={heads}/{kv_heads} dim={head_dim} scale={scale}{window}{}{sinks}",
            cap_text(*softcap)
        )
    }
}

/// Columns of an operand's heads, and where they are placed in each head of the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadPart {
    /// Heads of the operand.
    pub heads: usize,
    /// The first of these columns in a head of the operand.
    pub from: usize,
    pub columns: usize,
    /// Their first column in a head of the result.
    pub to: usize,
}

impl HeadPart {
    /// The part that moves gradients of these columns back: from heads of the result, so many, to those of the operand.
    pub fn reversed(self, heads: usize) -> HeadPart {
        HeadPart { heads, from: self.to, to: self.from, ..self }
    }
}

impl fmt::Display for HeadPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let HeadPart { heads, from, columns, to } = self;
        write!(f, "{from}+{columns} of {heads} at {to}")
    }
}

/// Attributes of an RMS norm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Norm {
    pub eps: f32,
    /// Multiplies by 1 + weight instead of weight.
    pub plus_one: bool,
}

impl fmt::Display for Norm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "eps={}{}", self.eps, if self.plus_one { " 1+w" } else { "" })
    }
}

/// Columns of the activity of a trained tensor: largest gradient after clipping, largest parameter, 1 once it has moved.
pub const ACTIVITY_COLUMNS: usize = 3;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    pub weight_decay: f64,
}

/// Identifies the random bits of a matrix: row r uses those of row `first_row` + r of tensor `tensor`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RandomPlace {
    pub seed: u64,
    pub tensor: u64,
    pub first_row: u64,
}

impl fmt::Display for RandomPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RandomPlace { seed, tensor, first_row } = self;
        write!(f, "seed={seed} tensor={tensor} row={first_row}")
    }
}

impl fmt::Display for AdamW {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let AdamW { beta1, beta2, eps, weight_decay } = self;
        write!(f, "betas={beta1},{beta2} eps={eps} decay={weight_decay}")
    }
}

pub(crate) fn rank_text(rank: Rank) -> String {
    format!("ranks={}", rank.of)
}

/// A norm in text forms.
pub(crate) fn norm_text(norm: &Norm, unweighted: Option<usize>) -> String {
    let groups = unweighted.map(|channels| format!(" groups={channels} unweighted"));
    format!("{norm}{}", groups.unwrap_or_default())
}

/// A factor in text forms; empty if it is 1.
pub(crate) fn scale_text(scale: f32) -> String {
    if scale == 1.0 { String::new() } else { format!("scale={scale}") }
}

/// A flag in text forms.
pub(crate) fn flag_text(is_set: bool, text: &'static str) -> &'static str {
    if is_set { text } else { "" }
}

/// The number of groups of columns in text forms; empty if it is 1.
pub(crate) fn groups_text(groups: usize) -> String {
    if groups == 1 { String::new() } else { format!(" groups={groups}") }
}

pub(crate) fn logits_text(first_word: usize, softcap: Option<f32>) -> String {
    let first = (first_word > 0).then(|| format!("from={first_word}"));
    let cap = softcap.map(|cap| format!("cap={cap}"));
    first.into_iter().chain(cap).collect::<Vec<_>>().join(" ")
}

pub(crate) fn embed_grad_text(scale: f32, padding: Option<u32>) -> String {
    let padding = padding.map(|row| format!(" padding={row}")).unwrap_or_default();
    format!("{}{padding}", scale_text(scale)).trim_start().to_owned()
}

/// Pairs (output, input) that may share one buffer, for x, a weight if there is one, dy, and an addend if there is one.
pub(crate) fn norm_grad_in_place(addend: bool, weight: bool) -> &'static [(usize, usize)] {
    match (addend, weight) {
        (true, true) => &[(0, 3), (0, 2), (0, 0)],
        (false, true) => &[(0, 2), (0, 0)],
        (true, false) => &[(0, 2), (0, 1), (0, 0)],
        (false, false) => &[(0, 1), (0, 0)],
    }
}
