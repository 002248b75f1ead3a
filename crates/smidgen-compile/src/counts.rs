//! The two numbers of layers that the searches vary: how many are recomputed, and how many have offloaded weights.
//!
//! Left out: choices with a few values each, which are the axes in `choices.rs`.

use crate::choices::{Copy, Point, weights_are_open};
use smidgen_ir::Choice;
use smidgen_ir::policy::Pins;

/// A number of layers in a [`Point`].
#[derive(Clone, Copy, Debug)]
pub struct Count {
    of: fn(&mut Point) -> &mut usize,
    pub copy: Copy,
    is_open: fn(&Pins) -> bool,
}

impl Count {
    pub fn at(&self, mut point: Point) -> usize {
        *(self.of)(&mut point)
    }

    pub fn with(&self, mut point: Point, count: usize) -> Point {
        *(self.of)(&mut point) = count;
        point
    }

    pub fn is_open(&self, pins: &Pins) -> bool {
        (self.is_open)(pins)
    }
}

pub const COUNTS: [Count; 2] = [
    Count {
        of: |point| &mut point.recomputed,
        copy: |to, from| to.recomputed = from.recomputed,
        is_open: |pins| !pins.sets(Choice::Recompute),
    },
    Count {
        of: |point| &mut point.weights,
        copy: |to, from| to.weights = from.weights,
        is_open: weights_are_open,
    },
];
