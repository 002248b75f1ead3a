//! Which memory choices work of a purpose has, and the pins of those that it does not have.
//!
//! `smidgen-ir` knows which part of the work a choice is about, which fields it has and what a policy without it is;
//! `choices.rs` knows how it is searched.

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

/// The choices that work of this purpose has.
pub fn choices_of(purpose: Purpose) -> impl Iterator<Item = Choice> {
    Choice::ALL.iter().copied().filter(move |choice| has(purpose, *choice))
}

/// The pins, and those of choices that a purpose does not have: fixed, so that no search varies them.
pub fn pins_for(purpose: Purpose, pins: &Pins) -> Pins {
    let missing = Choice::ALL.iter().filter(|choice| !has(purpose, **choice));
    missing.fold(pins.clone(), |pins, choice| pins.without(*choice))
}
