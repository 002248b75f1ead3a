//! Refuses numbers that are not finite in merges and exports.
//!
//! An adapter is checked before anything is written, so that the error names its tensor. Results are checked after
//! rounding, because a product of finite numbers may overflow.

use crate::failure::Failure;
use smidgen_formats::element::Element;
use smidgen_formats::finite::{NotFinite, first_not_finite};
use smidgen_formats::peft::AdapterFile;

const PIECE_BYTES: usize = 16 << 10;

/// Refuses an adapter that has a NaN or an infinity.
pub fn refuse_not_finite(adapter: &AdapterFile) -> Result<(), Failure> {
    let mut piece = [0u8; PIECE_BYTES];
    for (_, tensor) in adapter.tensors() {
        for offset in (0..tensor.bytes()).step_by(PIECE_BYTES) {
            let length = (tensor.bytes() - offset).min(PIECE_BYTES as u64) as usize;
            tensor.read_at(offset, &mut piece[..length]).map_err(Failure::model)?;
            let first = offset / tensor.element().size_bytes() as u64;
            check_finite(tensor.name(), tensor.element(), first, &piece[..length]).map_err(|error| {
                Failure::model(error)
                    .context(format!("the adapter in `{}` cannot be used", adapter.path().display()))
                    .hint("an earlier checkpoint of its run may be finite; a lower `train.lr` is the usual remedy")
            })?;
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

/// The error for a result that is not finite.
pub fn refused_result(error: NotFinite, element: Element) -> Failure {
    let failure = Failure::model(error).context("the result cannot be written");
    match element {
        Element::F16 => failure.hint("the largest f16 is 65504: use `--dtype f32` or `--dtype bf16`"),
        _ => failure.hint("the adapter's alpha or weights are too large, or the base is damaged"),
    }
}
