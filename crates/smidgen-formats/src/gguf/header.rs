//! Reads the header of a GGUF file: counts, metadata and tensor descriptions.
//! After `read_header` returns, keys and names are distinct, all tensor types are supported, rows are whole
//! blocks, and all tensors are inside the file and do not overlap.
//! It allocates in proportion to the size of the file, never by a number found in it.
//! Left out: what the metadata means. Bytes between or after tensors are ignored.

use super::problem::GgufProblem;
use super::tensor::{GgufTensor, piece_of, tensor_type};
use super::value::{Array, Kind, Metadata, Value};
use crate::open_file::{FileProblem, LFS_BEGINNING, OpenFile, first_duplicate};

pub const MAGIC: [u8; 4] = *b"GGUF";
pub const DEFAULT_ALIGNMENT: u64 = 32;
pub const ALIGNMENT_KEY: &str = "general.alignment";
/// The limit of the format.
const MAX_DIMENSIONS: u32 = 4;
/// The smallest metadata pair: length of the key, kind, and one byte.
const LEAST_PAIR_BYTES: u64 = 8 + 4 + 1;
/// The smallest tensor description: length of the name, count of dimensions, one dimension, type and offset.
const LEAST_TENSOR_BYTES: u64 = 8 + 4 + 8 + 4 + 8;
const BUFFER_BYTES: usize = 64 << 10;

pub struct Header {
    pub metadata: Metadata,
    /// In header order.
    pub tensors: Vec<GgufTensor>,
    pub alignment: u64,
    /// Where the data begins.
    pub data_offset: u64,
}

/// Reads and checks everything before the data.
pub(super) fn read_header(file: &OpenFile) -> Result<Header, GgufProblem> {
    let mut reader = Reader { file, at: 0, buffer: Vec::new(), buffer_at: 0 };
    check_magic_and_version(&mut reader)?;
    let tensor_count = reader.u64(|| "the tensor count".into())?;
    let pair_count = reader.u64(|| "the metadata count".into())?;
    reader.check_count("metadata pairs", pair_count, LEAST_PAIR_BYTES)?;
    let metadata = read_metadata(&mut reader, pair_count)?;
    let alignment = alignment_of(&metadata).ok_or_else(|| GgufProblem::Alignment {
        got: metadata.get(ALIGNMENT_KEY).map(Value::to_string).unwrap_or_default(),
    })?;
    reader.check_count("tensors", tensor_count, LEAST_TENSOR_BYTES)?;
    let mut described = Vec::with_capacity(tensor_count as usize);
    for position in 0..tensor_count {
        described.push(read_tensor(&mut reader, position, alignment)?);
    }
    if let Some(name) = first_duplicate(described.iter().map(|described| described.tensor.name.as_str())) {
        return Err(FileProblem::DuplicateTensor { tensor: name.to_string() }.into());
    }
    // Cannot overflow: the header is inside the file and the alignment is at most 2^30.
    let data_offset = reader.at.next_multiple_of(alignment);
    let tensors = place(described, data_offset, file.bytes)?;
    Ok(Header { metadata, tensors, alignment, data_offset })
}

fn check_magic_and_version(reader: &mut Reader<'_>) -> Result<(), GgufProblem> {
    let magic = reader.array::<4>(|| "the magic".into())?;
    match &magic {
        &MAGIC => {}
        b"FUGG" => return Err(GgufProblem::BigEndian),
        magic if LFS_BEGINNING.starts_with(magic.as_slice()) => return Err(FileProblem::LfsPointer.into()),
        _ => return Err(GgufProblem::NotGguf { starts_with: magic }),
    }
    let version = reader.u32(|| "the version".into())?;
    match version {
        2 | 3 => Ok(()),
        _ if matches!(version.swap_bytes(), 1..=3) => Err(GgufProblem::BigEndian),
        _ => Err(GgufProblem::Version { version }),
    }
}

fn read_metadata(reader: &mut Reader<'_>, pair_count: u64) -> Result<Metadata, GgufProblem> {
    let mut metadata = Metadata::default();
    for position in 0..pair_count {
        let key = reader.string(|| format!("metadata key {position}"))?;
        let number = reader.u32(|| format!("the type of `{key}`"))?;
        let value = read_value(reader, &key, number)?;
        if metadata.insert(&key, value).is_err() {
            return Err(GgufProblem::DuplicateKey { key });
        }
    }
    Ok(metadata)
}

fn read_value(reader: &mut Reader<'_>, key: &str, number: u32) -> Result<Value, GgufProblem> {
    let what = || format!("the value of `{key}`");
    match kind_of(key, number)? {
        Kind::Bool => Ok(Value::Bool(bool_of(key, reader.array::<1>(what)?[0])?)),
        Kind::String => Ok(Value::String(reader.string(what)?)),
        Kind::Array => {
            let element = kind_of(key, reader.u32(what)?)?;
            let count = reader.u64(what)?;
            read_array(reader, key, element, count).map(Value::Array)
        }
        kind => {
            let mut bytes = [0; 8];
            reader.fill(&mut bytes[..kind.least_bytes() as usize], what)?;
            Ok(Value::of_number(kind, bytes).expect("only numbers are left"))
        }
    }
}

fn read_array(reader: &mut Reader<'_>, key: &str, kind: Kind, count: u64) -> Result<Array, GgufProblem> {
    if kind == Kind::Array {
        return Err(GgufProblem::NestedArray { key: key.to_string() });
    }
    reader.check_count(&format!("elements of `{key}`"), count, kind.least_bytes())?;
    let count = count as usize;
    match kind {
        Kind::String => {
            let mut texts = Vec::with_capacity(count);
            for position in 0..count {
                texts.push(reader.string(|| format!("element {position} of `{key}`"))?);
            }
            Ok(Array::String(texts))
        }
        kind => {
            let mut bytes = vec![0; count * kind.least_bytes() as usize];
            reader.fill(&mut bytes, || format!("the elements of `{key}`"))?;
            match Array::of_numbers(kind, &bytes) {
                Some(numbers) => Ok(numbers),
                None => {
                    bytes.iter().map(|&byte| bool_of(key, byte)).collect::<Result<_, _>>().map(Array::Bool)
                }
            }
        }
    }
}

fn kind_of(key: &str, number: u32) -> Result<Kind, GgufProblem> {
    Kind::from_number(number).ok_or_else(|| GgufProblem::UnknownValueType { key: key.to_string(), number })
}

fn bool_of(key: &str, byte: u8) -> Result<bool, GgufProblem> {
    match byte {
        0 => Ok(false),
        1 => Ok(true),
        byte => Err(GgufProblem::NotABool { key: key.to_string(), byte }),
    }
}

/// The alignment of tensors in the file; `None` if the metadata sets one that is not a power of two from 8 to
/// 2^30.
pub(super) fn alignment_of(metadata: &Metadata) -> Option<u64> {
    let alignment = metadata.whole(ALIGNMENT_KEY).ok()?.unwrap_or(DEFAULT_ALIGNMENT);
    (alignment.is_power_of_two() && (8..=1 << 30).contains(&alignment)).then_some(alignment)
}

/// A tensor whose description is valid by itself. Its offset is aligned and relative to the data.
struct Described {
    tensor: GgufTensor,
    offset: u64,
}

fn read_tensor(reader: &mut Reader<'_>, position: u64, alignment: u64) -> Result<Described, GgufProblem> {
    let name = reader.string(|| format!("the name of tensor {position}"))?;
    let what = || format!("the description of tensor `{name}`");
    let dimensions = reader.u32(what)?;
    if !(1..=MAX_DIMENSIONS).contains(&dimensions) {
        return Err(GgufProblem::Dimensions { tensor: name, dimensions });
    }
    let mut dims = Vec::with_capacity(dimensions as usize);
    for _ in 0..dimensions {
        dims.push(reader.u64(what)?);
    }
    let number = reader.u32(what)?;
    let offset = reader.u64(what)?;
    let storage = match tensor_type(number) {
        Some((_, Some(storage))) => storage,
        Some((type_name, None)) => {
            return Err(GgufProblem::UnsupportedTensorType { tensor: name, name: type_name, number });
        }
        None => return Err(GgufProblem::UnknownTensorType { tensor: name, number }),
    };
    if dims.contains(&0) {
        return Err(GgufProblem::Empty { tensor: name, dims });
    }
    let (piece_elements, piece_bytes) = piece_of(storage);
    let columns = dims[0];
    if !columns.is_multiple_of(piece_elements) {
        let (name_of_type, _) = tensor_type(number).expect("the type was found above");
        return Err(GgufProblem::PartialBlock {
            tensor: name,
            columns,
            block: piece_elements,
            name: name_of_type,
        });
    }
    let row_bytes = (columns / piece_elements).checked_mul(piece_bytes);
    let bytes = dims[1..].iter().fold(row_bytes, |bytes, &extent| bytes?.checked_mul(extent));
    // The number of elements must fit too, because a block has more elements than bytes.
    let elements = dims.iter().try_fold(1_u64, |elements, &extent| elements.checked_mul(extent));
    let (Some(bytes), Some(_)) = (bytes, elements.and_then(|elements| usize::try_from(elements).ok())) else {
        return Err(GgufProblem::TooLarge { tensor: name, dims });
    };
    if !offset.is_multiple_of(alignment) {
        return Err(GgufProblem::Unaligned { tensor: name, offset, alignment });
    }
    let dims = dims.iter().rev().map(|&extent| extent as usize).collect();
    Ok(Described { tensor: GgufTensor { name, dims, storage, file: 0, file_offset: 0, bytes }, offset })
}

/// Fills in the offsets from the start of the file, and checks that all tensors are inside the file and do
/// not overlap.
fn place(
    mut described: Vec<Described>,
    data_offset: u64,
    file_bytes: u64,
) -> Result<Vec<GgufTensor>, GgufProblem> {
    let mut order: Vec<usize> = (0..described.len()).collect();
    order.sort_unstable_by_key(|&position| described[position].offset);
    let mut before: Option<(usize, u64)> = None;
    for &position in &order {
        let Described { tensor, offset } = &described[position];
        let Some(end) = offset.checked_add(tensor.bytes) else {
            let (tensor, offset, bytes) = (tensor.name.clone(), *offset, tensor.bytes);
            return Err(GgufProblem::OffsetOverflow { tensor, offset, bytes });
        };
        if let Some((other, other_end)) = before.filter(|&(_, other_end)| *offset < other_end) {
            return Err(GgufProblem::Overlap {
                tensor: tensor.name.clone(),
                offset: *offset,
                other: described[other].tensor.name.clone(),
                other_end,
            });
        }
        if file_bytes < data_offset || end > file_bytes - data_offset {
            let (tensor, needed_bytes) = (tensor.name.clone(), data_offset.saturating_add(end));
            return Err(FileProblem::Truncated { tensor, file_bytes, needed_bytes }.into());
        }
        before = Some((position, end));
    }
    for described in &mut described {
        described.tensor.file_offset = data_offset + described.offset;
    }
    Ok(described.into_iter().map(|described| described.tensor).collect())
}

/// Reads forward through a buffer. Every read is first checked against the size of the file.
struct Reader<'a> {
    file: &'a OpenFile,
    at: u64,
    buffer: Vec<u8>,
    /// Where the buffer begins in the file.
    buffer_at: u64,
}

impl Reader<'_> {
    fn left_bytes(&self) -> u64 {
        self.file.bytes - self.at
    }

    /// Refuses a count of items that cannot fit into the rest of the file.
    fn check_count(&self, what: &str, count: u64, least_bytes: u64) -> Result<(), GgufProblem> {
        let (bytes, left_bytes) = (count.checked_mul(least_bytes), self.left_bytes());
        match bytes {
            Some(bytes) if bytes <= left_bytes => Ok(()),
            _ => Err(GgufProblem::CountBeyondFile {
                what: what.to_string(),
                count,
                least_bytes: bytes,
                left_bytes,
            }),
        }
    }

    fn check_left(&self, bytes: u64, what: impl FnOnce() -> String) -> Result<(), GgufProblem> {
        if bytes > self.left_bytes() {
            return Err(GgufProblem::HeaderBeyondFile {
                what: what(),
                needed_bytes: bytes,
                at: self.at,
                file_bytes: self.file.bytes,
            });
        }
        Ok(())
    }

    fn fill(&mut self, destination: &mut [u8], what: impl FnOnce() -> String) -> Result<(), GgufProblem> {
        self.check_left(destination.len() as u64, what)?;
        let mut filled = 0;
        while filled < destination.len() {
            let begin = (self.at - self.buffer_at) as usize;
            if begin >= self.buffer.len() {
                let next = self.left_bytes().min(BUFFER_BYTES as u64) as usize;
                self.buffer.resize(next, 0);
                self.buffer_at = self.at;
                self.file.read_header(self.at, &mut self.buffer)?;
                continue;
            }
            let bytes = (self.buffer.len() - begin).min(destination.len() - filled);
            destination[filled..filled + bytes].copy_from_slice(&self.buffer[begin..begin + bytes]);
            filled += bytes;
            self.at += bytes as u64;
        }
        Ok(())
    }

    fn array<const N: usize>(&mut self, what: impl FnOnce() -> String) -> Result<[u8; N], GgufProblem> {
        let mut bytes = [0; N];
        self.fill(&mut bytes, what)?;
        Ok(bytes)
    }

    fn u32(&mut self, what: impl FnOnce() -> String) -> Result<u32, GgufProblem> {
        self.array(what).map(u32::from_le_bytes)
    }

    fn u64(&mut self, what: impl FnOnce() -> String) -> Result<u64, GgufProblem> {
        self.array(what).map(u64::from_le_bytes)
    }

    fn string(&mut self, what: impl Fn() -> String) -> Result<String, GgufProblem> {
        let length = self.u64(&what)?;
        self.check_left(length, &what)?;
        let at = self.at;
        let mut bytes = vec![0; length as usize];
        self.fill(&mut bytes, &what)?;
        String::from_utf8(bytes).map_err(|_| GgufProblem::NotUtf8 { what: what(), at })
    }
}
