//! The attributes of recurrent mixers: how fast states decay, and how tokens are written to them and read.
//!
//! The gated delta rule and the state space duality of Mamba-2 are one operation, a scan: a head keeps a matrix, which
//! decays, to which each token is written, and which the token's query reads. By the delta rule only that part of a value
//! is written which the state does not hold already.

use std::fmt;

/// How log decay and step of a token follow from projections of its input.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DecayShape {
    /// The range of steps.
    pub least: f32,
    pub most: f32,
    /// Tokens are written with this times the sigmoid of a projection of their own; `None` means with the step.
    pub write: Option<f32>,
}

impl fmt::Display for DecayShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DecayShape { least, most, write } = self;
        write!(f, "steps={least}..{most}")?;
        write.map_or(Ok(()), |write| write!(f, " write={write}"))
    }
}

/// The sizes of a scan.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScanShape {
    /// Heads of values, each with a state.
    pub heads: usize,
    /// Heads of queries and keys, each shared by neighbouring heads of values.
    pub key_heads: usize,
    pub key_dim: usize,
    pub value_dim: usize,
    /// Whether a token is written by the delta rule.
    pub delta: bool,
    /// Queries and keys are multiplied by these.
    pub query_scale: f32,
    pub key_scale: f32,
    /// Tokens between states that the backward pass stores; results do not depend on it.
    pub chunk: usize,
}

impl ScanShape {
    /// Channels of queries or keys, and of values.
    pub fn channels(&self) -> (usize, usize) {
        (self.key_heads * self.key_dim, self.heads * self.value_dim)
    }

    /// Numbers of the state of one head.
    pub fn state(&self) -> usize {
        self.key_dim * self.value_dim
    }

    /// Heads of values that share a head of keys.
    pub fn group(&self) -> usize {
        self.heads / self.key_heads
    }

    /// States of a head that the backward pass stores at the beginnings of chunks for this many tokens.
    pub fn chunks(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.chunk)
    }
}

impl fmt::Display for ScanShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ScanShape { heads, key_heads, key_dim, value_dim, delta, query_scale, key_scale, chunk } = self;
        write!(f, "heads={heads}/{key_heads} dims={key_dim}x{value_dim} scales={query_scale},{key_scale}")?;
        write!(f, "{} chunk={chunk}", if *delta { " delta" } else { "" })
    }
}
