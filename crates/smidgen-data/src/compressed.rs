//! Bytes of a data file, decompressed: plain, gzip (`.gz`) or zstd (`.zst`), by the end of the name.
//!
//! Decompression is streamed. Damaged and cut-off data give an error of their own, apart from a file that cannot be
//! read: `packing_error` distinguishes them.
//! Leaves out what the bytes are (`utf8_reader.rs`), and archives with several files.

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::Path;

use crate::source_error::{Compression, SourceError};

/// The decompressed bytes of a file.
pub(super) fn open_unpacked(path: &Path) -> Result<Box<dyn Read>, SourceError> {
    let file = File::open(path).map_err(|source| packing_error(path, source))?;
    Ok(match Compression::of(path) {
        Compression::None => Box::new(file),
        // A file of several members, as parallel tools write it, is read to its end.
        Compression::Gzip => Box::new(flate2::bufread::MultiGzDecoder::new(packed(file))),
        Compression::Zstd => {
            let unpacked = zstd::stream::read::Decoder::with_buffer(packed(file));
            Box::new(unpacked.map_err(|source| packing_error(path, source))?)
        }
    })
}

fn packed(file: File) -> BufReader<File> {
    BufReader::with_capacity(64 * 1024, file)
}

/// The error of a read: the file system's, or the decompression's.
pub(super) fn packing_error(path: &Path, source: io::Error) -> SourceError {
    let compression = Compression::of(path);
    let path = path.display().to_string();
    // Errors of the operating system carry its number, those of the decoders never do.
    match (compression, source.raw_os_error(), source.kind()) {
        (Compression::None, _, _) | (_, Some(_), _) => SourceError::Read { path, source },
        (_, None, io::ErrorKind::UnexpectedEof) => SourceError::CutOff { path, compression },
        (_, None, _) => SourceError::Damaged { path, compression, message: source.to_string() },
    }
}
