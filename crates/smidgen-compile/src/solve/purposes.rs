//! Which memory choices a purpose has, and pins for the choices that it does not have.
//!
//! `policy.rs` in `smidgen-ir` says which part of the work a choice is about, which fields it has and what a policy without
//! it is; `choices.rs` says how it is searched.

use crate::request::Purpose;
use smidgen_ir::policy::{Choice, Part, Pins};

fn has(purpose: Purpose, choice: Choice) -> bool {
    let last = match purpose {
        Purpose::Training => Part::Training,
        Purpose::Evaluation => Part::Loss,
        Purpose::Generation | Purpose::Logits | Purpose::Encoding => Part::Forward,
    };
    choice.part() <= last
}

/// The choices that a purpose has.
pub fn choices_of(purpose: Purpose) -> impl Iterator<Item = Choice> {
    Choice::ALL.iter().copied().filter(move |choice| has(purpose, *choice))
}

/// The pins, with the choices that a purpose does not have fixed to unused, so that no search varies them.
pub fn pins_for(purpose: Purpose, pins: &Pins) -> Pins {
    let missing = Choice::ALL.iter().filter(|choice| !has(purpose, **choice));
    missing.fold(pins.clone(), |pins, choice| pins.without(*choice))
}
