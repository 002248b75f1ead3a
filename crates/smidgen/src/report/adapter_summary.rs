//! The contents of an adapter: its sizes, and the norm of each module's update.
//! The norm of s·B·A comes from two R by R matrices: |BA|² is the sum of (Bᵀ B) ∘ (A Aᵀ), so B·A, which has the size of
//! a base weight, is never computed. Sums are in f64; one module's A and B are in memory at a time.
//! A DoRA magnitude only has a meaning relative to the base, so it is compared with the base if one is given.
//! Left out: text and columns (`adapter_table`).

use super::fourier_table::FourierRow;
use crate::failure::Failure;
use crate::merge::fold::row_norm;
use crate::model_files::numbers::read_f32;
use crate::model_files::original::{OriginalModel, OriginalRows};
use serde::Serialize;
use smidgen_formats::peft::{AdapterFile, AdapterModule, Bias, read_modules, split_layer};
use smidgen_formats::tensor_ref::TensorRef;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Rows of the base that are held in memory at a time.
const BLOCK_BYTES: usize = 4 << 20;

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AdapterSummary {
    pub path: PathBuf,
    pub kind: &'static str,
    /// The base model that the adapter names.
    pub base: Option<String>,
    pub bias: Bias,
    pub parameters: u64,
    /// Bytes of all tensors.
    pub bytes: u64,
    /// Element types and how many tensors have them.
    pub elements: BTreeMap<&'static str, usize>,
    /// Number of trained biases, of modules with and without an adapter.
    pub biases: usize,
    pub modules: Vec<ModuleSummary>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ModuleSummary {
    #[serde(rename = "module")]
    pub path: String,
    pub layer: Option<usize>,
    pub rank: usize,
    pub alpha: f64,
    pub scale: f64,
    /// The shape of the base weight.
    pub shape: [usize; 2],
    pub parameters: u64,
    pub a_norm: f64,
    pub b_norm: f64,
    /// The norm of s·B·A.
    pub product_norm: f64,
    #[serde(flatten)]
    pub magnitude: Option<Magnitude>,
    #[serde(skip)]
    pub fourier: Option<FourierRow>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub enum Magnitude {
    #[serde(rename = "magnitude_norm")]
    Norm(f64),
    /// |m - n| / n over the rows, where n is the length of the base's row.
    #[serde(rename = "magnitude_change")]
    Change { mean: f64, max: f64 },
}

pub fn summarize_adapter(
    adapter: &AdapterFile,
    original: Option<&OriginalModel>,
) -> Result<AdapterSummary, Failure> {
    let read = read_modules(adapter).map_err(Failure::model)?;
    let mut elements = BTreeMap::new();
    let (mut parameters, mut bytes) = (0, 0);
    for (_, tensor) in adapter.tensors() {
        *elements.entry(tensor.element().name()).or_insert(0) += 1;
        parameters += tensor.elements();
        bytes += tensor.bytes();
    }
    let modules = read.modules.iter().map(|module| summarize_module(module, original));
    Ok(AdapterSummary {
        path: adapter.path().to_path_buf(),
        kind: adapter.config().kind().name(),
        base: adapter.config().base_model_name_or_path.clone(),
        bias: adapter.config().bias,
        parameters,
        bytes,
        elements,
        modules: modules.collect::<Result<_, _>>()?,
        biases: read.biases.len() + read.modules.iter().filter(|module| module.bias.is_some()).count(),
    })
}

fn summarize_module(
    module: &AdapterModule,
    original: Option<&OriginalModel>,
) -> Result<ModuleSummary, Failure> {
    let (a, b) = (read_all(&module.a)?, read_all(&module.b)?); // (E·R, in), (out, R·E)
    let (rank, experts) = (module.rank, module.experts());
    let (mut a_squares, mut b_squares, mut product) = (0.0, 0.0, 0.0);
    for (expert, a) in a.chunks_exact(rank * module.columns()).enumerate() {
        let rows = b.chunks_exact(rank * experts);
        let b: Vec<f32> = rows.flat_map(|row| row[expert..].iter().step_by(experts)).copied().collect(); // (out, R)
        let (a_gram, b_gram) = (gram_of_rows(a, rank), gram_of_columns(&b, rank));
        let trace = |gram: &[f64]| (0..rank).map(|i| gram[i * rank + i]).sum::<f64>();
        a_squares += trace(&a_gram);
        b_squares += trace(&b_gram);
        product += a_gram.iter().zip(&b_gram).map(|(a, b)| a * b).sum::<f64>();
    }
    let summarize = |magnitude| summarize_magnitude(module, &read_all(magnitude)?, original);
    let magnitude = module.magnitude.as_ref().map(summarize).transpose()?;
    let fourier = fourier_row(module)?;
    let tensors = [Some(&module.a), Some(&module.b), module.magnitude.as_ref(), module.bias.as_ref()];
    let fourier_parameters = if module.fourier.is_some() { 5 } else { 0 };
    Ok(ModuleSummary {
        path: module.path.clone(),
        layer: split_layer(&module.path).0,
        rank: module.rank,
        alpha: module.alpha,
        scale: module.scale,
        shape: [module.rows(), module.columns()],
        parameters: tensors.into_iter().flatten().map(TensorRef::elements).sum::<u64>() + fourier_parameters,
        a_norm: a_squares.sqrt(),
        b_norm: b_squares.sqrt(),
        // Rounding may give a tiny negative sum for a product of zero.
        product_norm: module.scale.abs() * product.max(0.0).sqrt(),
        magnitude,
        fourier,
    })
}

/// The Fourier coefficients of an LS-LoRA adapter, by module.
pub fn fourier_rows(adapter: &AdapterFile) -> Result<Vec<FourierRow>, Failure> {
    let read = read_modules(adapter).map_err(Failure::model)?;
    read.modules.iter().filter_map(|module| fourier_row(module).transpose()).collect()
}

fn fourier_row(module: &AdapterModule) -> Result<Option<FourierRow>, Failure> {
    let Some((weight, sigma)) = &module.fourier else { return Ok(None) };
    let (mut coefficients, mut width) = ([0.0; 4], [0.0]);
    read_f32(weight, 0, &mut coefficients)?;
    read_f32(sigma, 0, &mut width)?;
    Ok(Some(FourierRow { module: module.path.clone(), coefficients, sigma: width[0] }))
}

fn summarize_magnitude(
    module: &AdapterModule,
    magnitude: &[f32],
    original: Option<&OriginalModel>,
) -> Result<Magnitude, Failure> {
    let Some(original) = original else { return Ok(Magnitude::Norm(row_norm(magnitude))) };
    let name = format!("{}.weight", module.path);
    let weight = original
        .tensor(&name)
        .filter(|weight| weight.is_real() && weight.shape() == [module.rows(), module.columns()])
        .ok_or_else(|| {
            let place = original.path().display();
            let shape = [module.rows(), module.columns()];
            Failure::model(format!("the base model `{place}` has no `{name}` of shape {shape:?}"))
        })?;
    let columns = module.columns();
    let rows_at_a_time = (BLOCK_BYTES / size_of::<f32>() / columns).clamp(1, module.rows());
    let mut block = vec![0.0; rows_at_a_time * columns];
    let mut held = Vec::new();
    let stored = OriginalRows::open(weight, &mut held)?;
    let (mut sum, mut max) = (0f64, 0f64);
    for (number, wanted) in magnitude.chunks(rows_at_a_time).enumerate() {
        let values = &mut block[..wanted.len() * columns];
        stored.read(number * rows_at_a_time, wanted.len(), values)?;
        for (row, &wanted) in values.chunks_exact(columns).zip(wanted) {
            let norm = row_norm(row);
            let change = (f64::from(wanted) - norm).abs() / norm;
            (sum, max) = (sum + change, max.max(change));
        }
    }
    Ok(Magnitude::Change { mean: sum / module.rows() as f64, max })
}

fn read_all(tensor: &TensorRef) -> Result<Vec<f32>, Failure> {
    let mut values = vec![0.0; tensor.elements() as usize];
    read_f32(tensor, 0, &mut values)?;
    Ok(values)
}

/// A Aᵀ of A (R, n), as (R, R).
fn gram_of_rows(a: &[f32], rank: usize) -> Vec<f64> {
    let columns = a.len() / rank;
    let row = |i: usize| &a[i * columns..][..columns];
    let mut gram = vec![0.0; rank * rank];
    for i in 0..rank {
        for j in 0..=i {
            let dot: f64 = row(i).iter().zip(row(j)).map(|(p, q)| f64::from(*p) * f64::from(*q)).sum();
            (gram[i * rank + j], gram[j * rank + i]) = (dot, dot);
        }
    }
    gram
}

/// Bᵀ B of B (n, R), as (R, R).
fn gram_of_columns(b: &[f32], rank: usize) -> Vec<f64> {
    let mut gram = vec![0.0; rank * rank];
    for row in b.chunks_exact(rank) {
        for (&left, sums) in row.iter().zip(gram.chunks_exact_mut(rank)) {
            for (sum, &right) in sums.iter_mut().zip(row) {
                *sum += f64::from(left) * f64::from(right);
            }
        }
    }
    gram
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_norm_of_the_product_comes_from_gram_matrices() {
        // A is (2, 3), B is (2, 2): BA = [[1, 2, 3], [2, 7, 6]], whose squares sum to 103.
        let (a, b) = ([1.0, 2.0, 3.0, 0.0, 3.0, 0.0], [1.0, 0.0, 2.0, 1.0]);
        let (a_gram, b_gram) = (gram_of_rows(&a, 2), gram_of_columns(&b, 2));
        assert_eq!(a_gram, [14.0, 6.0, 6.0, 9.0]);
        assert_eq!(b_gram, [5.0, 2.0, 2.0, 1.0]);
        assert_eq!(a_gram.iter().zip(&b_gram).map(|(a, b)| a * b).sum::<f64>(), 103.0);
    }
}
