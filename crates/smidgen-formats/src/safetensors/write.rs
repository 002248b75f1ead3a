//! Writes a safetensors file tensor by tensor, byte for byte as the safetensors library would.
//! A callback writes one tensor at a time, so only its own buffer is in memory.
//! Tensors are in the library's order: by element type, largest alignment first, then by name.
//! The header is padded with spaces so that the data starts at a multiple of 8.
//! A caller that writes tensors out of order gets the layout from `lay_out_file` and writes the bytes itself.
//! Left out: sharding, which the caller does.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::Path;

use serde_json::json;
use thiserror::Error;

use super::problem::{MAX_HEADER_BYTES, PREFIX_BYTES};
use crate::element::Element;
use crate::exact_writer::write_exactly;
use crate::open_file::first_duplicate;
use crate::whole_file::{StagedFile, WriteFileError, commit_together};
use smidgen_ir::grouped_digits::Grouped;

/// A tensor to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    pub name: String,
    pub element: Element,
    pub shape: Vec<usize>,
}

#[derive(Debug, Error)]
pub enum WriteSafetensorsError {
    #[error("tensor `{name}` is listed twice")]
    DuplicateName { name: String },
    #[error("`__metadata__` cannot be the name of a tensor")]
    ReservedName,
    #[error("the tensors up to `{name}` take more than 2^64 bytes")]
    TooManyBytes { name: String },
    #[error(
        "the header would have {} bytes, the limit is {}", Grouped(*header_bytes), Grouped(*max_bytes)
    )]
    HeaderTooLong { header_bytes: u64, max_bytes: u64 },
    #[error(transparent)]
    File(#[from] WriteFileError),
}

/// The metadata `format = pt`, without which some versions of transformers refuse a file.
pub fn pytorch_metadata() -> BTreeMap<String, String> {
    BTreeMap::from([("format".to_string(), "pt".to_string())])
}

/// Writes the file completely or not at all.
/// `source` is called with positions in `tensors`, in file order, and writes exactly the bytes of that
/// tensor, row-major and little-endian.
pub fn write_safetensors(
    path: &Path,
    metadata: &BTreeMap<String, String>,
    tensors: &[TensorSpec],
    source: impl FnMut(usize, &mut dyn Write) -> io::Result<()>,
) -> Result<(), WriteSafetensorsError> {
    let staged = stage_safetensors(path, metadata, tensors, source)?;
    Ok(commit_together(vec![staged])?)
}

/// Like `write_safetensors`, but the caller commits the file.
pub fn stage_safetensors(
    path: &Path,
    metadata: &BTreeMap<String, String>,
    tensors: &[TensorSpec],
    mut source: impl FnMut(usize, &mut dyn Write) -> io::Result<()>,
) -> Result<StagedFile, WriteSafetensorsError> {
    let layout = lay_out(tensors)?;
    let header = header_bytes(metadata, &layout, MAX_HEADER_BYTES)?;
    let mut staged = StagedFile::create(path)?;
    staged.write(|writer| {
        writer.write_all(&(header.len() as u64).to_le_bytes())?;
        writer.write_all(&header)?;
        for Placed { position, tensor, begin, end } in &layout {
            write_exactly(writer, &tensor.name, end - begin, |out| source(*position, out))?;
        }
        Ok(())
    })?;
    Ok(staged)
}

/// The header of a file, and where each tensor goes.
pub struct FileLayout {
    /// The length prefix and the header.
    pub beginning: Vec<u8>,
    /// Offsets of the tensors from the start of the file, in the order of the caller's list.
    pub offsets: Vec<u64>,
    pub file_bytes: u64,
}

/// The layout of the file that [`write_safetensors`] would write.
pub fn lay_out_file(
    metadata: &BTreeMap<String, String>,
    tensors: &[TensorSpec],
) -> Result<FileLayout, WriteSafetensorsError> {
    let layout = lay_out(tensors)?;
    let header = header_bytes(metadata, &layout, MAX_HEADER_BYTES)?;
    let beginning = [&(header.len() as u64).to_le_bytes()[..], &header].concat();
    let data_offset = beginning.len() as u64;
    let mut offsets = vec![0; tensors.len()];
    for placed in &layout {
        offsets[placed.position] = data_offset + placed.begin;
    }
    let data_bytes = layout.last().map_or(0, |placed| placed.end);
    Ok(FileLayout { beginning, offsets, file_bytes: data_offset + data_bytes })
}

struct Placed<'a> {
    /// Position in the caller's list.
    position: usize,
    tensor: &'a TensorSpec,
    /// From the start of the data.
    begin: u64,
    end: u64,
}

/// The tensors in file order.
fn lay_out(tensors: &[TensorSpec]) -> Result<Vec<Placed<'_>>, WriteSafetensorsError> {
    let mut order: Vec<usize> = (0..tensors.len()).collect();
    order.sort_by(|&left, &right| {
        let (left, right) = (&tensors[left], &tensors[right]);
        (right.element.cmp(&left.element)).then_with(|| left.name.cmp(&right.name))
    });
    if let Some(name) = first_duplicate(tensors.iter().map(|tensor| tensor.name.as_str())) {
        return Err(WriteSafetensorsError::DuplicateName { name: name.to_string() });
    }
    if tensors.iter().any(|tensor| tensor.name == "__metadata__") {
        return Err(WriteSafetensorsError::ReservedName);
    }
    let mut begin = 0_u64;
    order
        .into_iter()
        .map(|position| {
            let tensor = &tensors[position];
            let end = (tensor.element.tensor_bytes(&tensor.shape))
                .and_then(|bytes| begin.checked_add(bytes))
                .ok_or_else(|| WriteSafetensorsError::TooManyBytes { name: tensor.name.clone() })?;
            let placed = Placed { position, tensor, begin, end };
            begin = end;
            Ok(placed)
        })
        .collect()
}

fn header_bytes(
    metadata: &BTreeMap<String, String>,
    layout: &[Placed<'_>],
    max_bytes: u64,
) -> Result<Vec<u8>, WriteSafetensorsError> {
    let metadata = (!metadata.is_empty()).then(|| format!("\"__metadata__\":{}", json!(metadata)));
    let entries = layout.iter().map(|Placed { tensor, begin, end, .. }| {
        let (dtype, shape) = (tensor.element.name(), &tensor.shape);
        let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": [begin, end]});
        format!("{}:{entry}", json!(tensor.name))
    });
    let parts: Vec<String> = metadata.into_iter().chain(entries).collect();
    let mut header = format!("{{{}}}", parts.join(",")).into_bytes();
    header.resize(header.len().next_multiple_of(PREFIX_BYTES as usize), b' ');
    if header.len() as u64 > max_bytes {
        return Err(WriteSafetensorsError::HeaderTooLong { header_bytes: header.len() as u64, max_bytes });
    }
    Ok(header)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::fs;

    use super::*;
    use crate::safetensors::SafetensorsFile;

    fn spec(name: &str, element: Element, shape: &[usize]) -> TensorSpec {
        TensorSpec { name: name.to_string(), element, shape: shape.to_vec() }
    }

    fn data_of(position: usize, spec: &TensorSpec) -> Vec<u8> {
        let bytes = spec.element.tensor_bytes(&spec.shape).unwrap();
        (0..bytes).map(|i| (i as u8) ^ (position as u8 * 17)).collect()
    }

    #[test]
    fn the_bytes_are_those_of_the_safetensors_library_and_read_back() {
        let specs = [
            spec("b.lora_B.weight", Element::F32, &[3, 2]),
            spec("a.lora_A.weight", Element::Bf16, &[2, 5]),
            spec("mask", Element::Bool, &[7]),
            spec("scalar \"é\"", Element::F32, &[]),
            spec("half", Element::F16, &[3]),
            spec("a.lora_B.weight", Element::F32, &[1]),
            spec("steps", Element::I64, &[1]),
            spec("none", Element::F32, &[4, 0]),
        ];
        let data: Vec<Vec<u8>> = specs.iter().enumerate().map(|(i, s)| data_of(i, s)).collect();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.safetensors");
        write_safetensors(&path, &pytorch_metadata(), &specs, |i, w| w.write_all(&data[i])).unwrap();

        let views = specs.iter().zip(&data).map(|(spec, data)| {
            let dtype = serde_json::from_value(spec.element.name().into()).unwrap();
            let view = ::safetensors::tensor::TensorView::new(dtype, spec.shape.clone(), data);
            (spec.name.clone(), view.unwrap())
        });
        let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
        let theirs = ::safetensors::serialize(views, Some(metadata)).unwrap();
        assert_eq!(fs::read(&path).unwrap(), theirs);

        let file = SafetensorsFile::open(&path).unwrap();
        assert_eq!(file.metadata(), &pytorch_metadata());
        assert_eq!(file.tensors().len(), specs.len());
        for (spec, data) in specs.iter().zip(&data) {
            let entry = file.tensor(&spec.name).unwrap();
            assert_eq!((entry.element, &entry.shape), (spec.element, &spec.shape));
            let mut read = vec![0; entry.bytes as usize];
            file.read_at(entry, 0, &mut read).unwrap();
            assert_eq!(&read, data);
        }
    }

    #[test]
    fn the_data_starts_at_a_multiple_of_eight() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.safetensors");
        for length in 1..10 {
            let specs = [spec(&"n".repeat(length), Element::U8, &[1])];
            write_safetensors(&path, &BTreeMap::new(), &specs, |_, w| w.write_all(&[1])).unwrap();
            let file = SafetensorsFile::open(&path).unwrap();
            assert_eq!(file.tensors()[0].file_offset % 8, 0);
        }
    }

    #[test]
    fn a_source_that_writes_too_little_or_too_much_leaves_the_old_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.safetensors");
        fs::write(&path, "old").unwrap();
        let specs = [spec("x", Element::F32, &[2])];
        let attempt = |bytes: usize| {
            write_safetensors(&path, &pytorch_metadata(), &specs, |_, w| {
                (0..bytes).try_for_each(|_| w.write_all(&[0]))
            })
            .unwrap_err()
            .to_string()
        };
        assert!(attempt(7).ends_with("the source of tensor `x` gave 7 of 8 bytes"));
        assert!(attempt(9).ends_with("the source of tensor `x` gave more bytes than its shape needs"));
        assert_eq!(fs::read_to_string(&path).unwrap(), "old");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn invalid_lists_of_tensors_are_refused() {
        let check = |specs: &[TensorSpec], expected: &str| {
            let path = Path::new("/nonexistent/m.safetensors");
            let error = write_safetensors(path, &BTreeMap::new(), specs, |_, _| Ok(())).unwrap_err();
            assert_eq!(error.to_string(), expected);
        };
        let x = spec("x", Element::F32, &[1]);
        check(&[x.clone(), spec("x", Element::Bf16, &[2])], "tensor `x` is listed twice");
        check(&[spec("__metadata__", Element::F32, &[1])], "`__metadata__` cannot be the name of a tensor");
        check(
            &[x, spec("y", Element::F32, &[usize::MAX])],
            "the tensors up to `y` take more than 2^64 bytes",
        );
    }

    #[test]
    fn a_header_that_the_reader_would_refuse_is_not_written() {
        let specs = [spec(&"n".repeat(100), Element::U8, &[1])];
        let layout = lay_out(&specs).unwrap();
        let exact = header_bytes(&BTreeMap::new(), &layout, 1 << 20).unwrap().len() as u64;
        assert!(header_bytes(&BTreeMap::new(), &layout, exact).is_ok());
        assert_eq!(
            header_bytes(&BTreeMap::new(), &layout, exact - 1).unwrap_err().to_string(),
            format!("the header would have {exact} bytes, the limit is {}", exact - 1)
        );
    }
}
