//! Bytes of a data file, decompressed: plain, gzip (`.gz`) or zstd (`.zst`), by the end of the name.
//!
//! Decompression is streamed. `packing_error` distinguishes damaged and cut-off data from a file that cannot be read.
//! Archives with several files are not supported.

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::Path;

use crate::source_error::{Compression, SourceError};

/// The decompressed bytes of a file.
pub(super) fn open_unpacked(path: &Path) -> Result<Box<dyn Read>, SourceError> {
    let file = File::open(path).map_err(|source| packing_error(path, source))?;
    Ok(match Compression::of(path) {
        Compression::None => Box::new(file),
        // Parallel tools write files of several gzip members; all of them are read.
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
