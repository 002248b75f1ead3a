//! Which memory choices work of a purpose has, and the pins of those that it does not have.
//!
//! Which fields a choice has, and what a policy without it is, say `Policy` and `Pins`; how it is searched says `choices.rs`.

use crate::request::Purpose;
use smidgen_ir::Choice;
use smidgen_ir::policy::Pins;

fn has(purpose: Purpose, choice: Choice) -> bool {
    match choice {
        Choice::Recompute
        | Choice::Activations
        | Choice::OptimizerState
        | Choice::Gradients
        | Choice::Order
        | Choice::Laps
        | Choice::Updates => purpose == Purpose::Training,
        Choice::MicroBatch | Choice::LossChunk | Choice::Tiles => {
            matches!(purpose, Purpose::Training | Purpose::Evaluation)
        }
        Choice::Weights | Choice::HeadPieces | Choice::Embedding | Choice::Sharding => true,
    }
}

/// The choices that work of this purpose has.
pub fn choices_of(purpose: Purpose) -> impl Iterator<Item = Choice> {
    Choice::ALL.into_iter().filter(move |choice| has(purpose, *choice))
}

/// The pins, and those of choices that a purpose does not have: fixed, so that no search varies them.
pub fn pins_for(purpose: Purpose, pins: &Pins) -> Pins {
    let missing = Choice::ALL.into_iter().filter(|choice| !has(purpose, *choice));
    missing.fold(pins.clone(), |pins, choice| pins.without(choice))
}
