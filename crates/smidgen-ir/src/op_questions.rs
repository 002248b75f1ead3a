//! What stages and devices ask about an operation, answered by the columns of its row.
//!
//! Each answer follows from the op table, so a new operation needs nothing here.

use crate::op::Op;
use crate::op_table::{Batching, Fusion, Property, Route};
use crate::rank::Rank;

impl Op {
    /// Whether a device may compute `next`, which follows, in the same kernel.
    pub fn fuses_with(&self, next: &Op) -> bool {
        let rounds = self.has(Property::Rounds).then_some(Fusion::Rounding);
        next.ends().is_some_and(|fusion| self.begins().or(rounds) == Some(fusion))
    }

    pub fn is_loss(&self) -> bool {
        self.has(Property::Loss)
    }

    /// Whether the operation only starts a copy between memory spaces, an exchange between ranks, or work of the host; a
    /// later step waits for it.
    pub fn is_transfer(&self) -> bool {
        self.route().is_some()
    }

    /// Whether the operation copies between the device and host memory or disk.
    pub fn is_copy(&self) -> bool {
        matches!(self.route(), Some(Route::ToDevice | Route::FromDevice))
    }

    /// The ranks of an exchange, in which all of them take part.
    pub fn exchange(&self) -> Option<Rank> {
        match self.route() {
            Some(Route::Ranks { rank, .. }) => Some(rank),
            _ => None,
        }
    }

    pub fn is_collective(&self) -> bool {
        self.exchange().is_some()
    }

    /// Whether the operation sums over ranks what the micro-batches of an optimizer step have accumulated.
    pub fn is_sum(&self) -> bool {
        matches!(self.route(), Some(Route::Ranks { is_sum: true, .. }))
    }

    /// Whether the host computes while the device continues.
    pub fn runs_on_host(&self) -> bool {
        self.route() == Some(Route::Host)
    }

    /// Whether a device may launch this together with `before`, which is the same operation on other tensors.
    pub fn joins(&self, before: &Op) -> bool {
        match self.batching() {
            Batching::Alone => false,
            Batching::EqualAttributes => self == before,
            Batching::AnyAttributes => std::mem::discriminant(self) == std::mem::discriminant(before),
        }
    }
}
