//! Refuses numbers that are not finite in merges and exports.
//!
//! An adapter is checked before anything is written, so that the error names its tensor. Results are checked after
//! rounding, because a product of finite numbers may overflow.
//! A finite number can be too large as well: a norm squares what a weight adds to, and squares of more than 1.8e19 are
//! infinite in f32.

use super::numbers::widen_into;
use crate::failure::Failure;
use smidgen_formats::element::Element;
use smidgen_formats::finite::{NotFinite, first_not_finite};
use smidgen_formats::load::can_read_as;
use smidgen_formats::peft::AdapterFile;

const PIECE_BYTES: usize = 16 << 10;
/// The largest number whose square is finite in f32.
const LARGEST: f32 = 1.8446743e19;
const TOO_LARGE: &str = "the adapter's alpha or weights are too large, or the base is damaged";

/// Refuses an adapter that has a NaN or an infinity.
pub fn refuse_not_finite(adapter: &AdapterFile) -> Result<(), Failure> {
    let (mut piece, mut values) = ([0u8; PIECE_BYTES], [0f32; PIECE_BYTES / 2]);
    for (_, tensor) in adapter.tensors() {
        for offset in (0..tensor.bytes()).step_by(PIECE_BYTES) {
            let length = (tensor.bytes() - offset).min(PIECE_BYTES as u64) as usize;
            tensor.read_at(offset, &mut piece[..length]).map_err(Failure::model)?;
            let first = offset / tensor.element().size_bytes() as u64;
            let unusable = |failure: Failure| {
                failure.context(format!("the adapter in `{}` cannot be used", adapter.path().display())).hint(
                    "an earlier checkpoint of its run may be finite; a lower `train.lr` is the usual remedy",
                )
            };
            check_finite(tensor.name(), tensor.element(), first, &piece[..length])
                .map_err(|error| unusable(Failure::model(error)))?;
            if !can_read_as(tensor.element(), Element::F32) {
                continue;
            }
            let values = &mut values[..length / tensor.element().size_bytes()];
            widen_into(&piece[..length], tensor.element(), values);
            check_size(tensor.name(), first, values).map_err(unusable)?;
        }
    }
    Ok(())
}

/// Checks elements of a tensor; `first` is the index of the first one.
pub fn check_finite(tensor: &str, element: Element, first: u64, bytes: &[u8]) -> Result<(), NotFinite> {
    match first_not_finite(element, bytes) {
        None => Ok(()),
        Some((place, value)) => Err(NotFinite {
            tensor: tensor.to_owned(),
            element: first + place as u64,
            value: value.to_string(),
        }),
    }
}

/// Refuses finite numbers that make activations overflow.
pub fn check_size(tensor: &str, first: u64, values: &[f32]) -> Result<(), Failure> {
    let is_too_large = |value: &f32| value.is_finite() && value.abs() > LARGEST;
    // The loop over a block has no branch, so the compiler vectorizes it.
    if !values.iter().fold(false, |any, value| any | is_too_large(value)) {
        return Ok(());
    }
    let place = values.iter().position(is_too_large).unwrap_or_default();
    Err(Failure::model(format!(
        "tensor `{tensor}` is too large: element {} is {:.2e}, and the square of more than {LARGEST:.1e} is infinite",
        first + place as u64,
        values[place]
    )))
}

/// The error for a result that is not finite.
pub fn refused_result(error: NotFinite, element: Element) -> Failure {
    let failure = Failure::model(error).context("the result cannot be written");
    match element {
        Element::F16 => failure.hint("the largest f16 is 65504: use `--dtype f32` or `--dtype bf16`"),
        _ => failure.hint(TOO_LARGE),
    }
}

/// The error for a result that is finite and too large.
pub fn too_large_result(failure: Failure) -> Failure {
    let failure = failure.context("the result cannot be written");
    failure.hint(TOO_LARGE)
}
