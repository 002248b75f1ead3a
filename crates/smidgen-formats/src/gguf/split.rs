//! Models that `llama-gguf-split` has cut into several files: `NAME-00001-of-00003.gguf` and so on.
//!
//! The first file has all metadata; each has its own tensors. The user names the first one, and the others are beside it.
//! Left out: cutting a model.

use super::header::{Header, read_header};
use super::problem::GgufProblem;
use super::tensor::GgufTensor;
use super::value::Metadata;
use crate::open_file::{FileProblem, OpenFile, first_duplicate};
use std::path::Path;

/// The most files of a model: their names have five digits.
const MOST_FILES: u64 = 99_999;

/// Opens the other files of a split model, and adds their tensors to those of the first one.
pub(super) fn open_others(
    path: &Path,
    metadata: &Metadata,
    tensors: &mut Vec<GgufTensor>,
) -> Result<Vec<OpenFile>, GgufProblem> {
    let Some((number, count)) = place(metadata)? else { return Ok(vec![]) };
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let stem = name.strip_suffix(&ending(number, count));
    if number != 0 {
        let first = stem.map(|stem| format!("{stem}{}", ending(0, count)));
        return Err(GgufProblem::NotTheFirst { number: number + 1, count, first });
    }
    let stem = stem.ok_or_else(|| GgufProblem::SplitName { count, expected: ending(0, count) })?;
    let mut files = Vec::new();
    for number in 1..count {
        let name = format!("{stem}{}", ending(number, count));
        let in_file =
            |problem: GgufProblem| GgufProblem::InPart { name: name.clone(), problem: Box::new(problem) };
        let file =
            OpenFile::open_inside(&path.with_file_name(&name)).map_err(|problem| in_file(problem.into()))?;
        let Header { metadata, tensors: own, .. } = read_header(&file).map_err(in_file)?;
        if place(&metadata)? != Some((number, count)) {
            return Err(in_file(GgufProblem::OtherSplit { number: number + 1, count }));
        }
        tensors.extend(own.into_iter().map(|tensor| GgufTensor { file: number as usize, ..tensor }));
        files.push(file);
    }
    if let Some(tensor) = first_duplicate(tensors.iter().map(|tensor| tensor.name.as_str())) {
        return Err(FileProblem::DuplicateTensor { tensor: tensor.to_string() }.into());
    }
    let expected = metadata.whole("split.tensors.count")?;
    match expected.filter(|expected| *expected != tensors.len() as u64) {
        Some(expected) => Err(GgufProblem::SplitTensors { expected, got: tensors.len() }),
        None => Ok(files),
    }
}

/// The number of a file, from 0, and how many there are; `None` if the model is in one file.
fn place(metadata: &Metadata) -> Result<Option<(u64, u64)>, GgufProblem> {
    let Some(count) = metadata.whole("split.count")?.filter(|count| *count > 1) else { return Ok(None) };
    let number = metadata.whole("split.no")?.unwrap_or(0);
    if number >= count || count > MOST_FILES {
        return Err(GgufProblem::OtherSplit { number: number.saturating_add(1), count });
    }
    Ok(Some((number, count)))
}

fn ending(number: u64, count: u64) -> String {
    format!("-{:05}-of-{count:05}.gguf", number + 1)
}
