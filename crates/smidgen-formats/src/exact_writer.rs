//! Checks that exactly the bytes of one tensor are written.
//! One byte too many or too few would shift every tensor behind it, and the file would still parse.
//! Left out: what the bytes are.

use std::io::{self, Write};

use smidgen_ir::grouped_digits::Grouped;

/// Lets `source` write the tensor `name`, and fails unless it writes exactly `bytes`.
pub(crate) fn write_exactly(
    writer: &mut dyn Write,
    name: &str,
    bytes: u64,
    source: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> io::Result<()> {
    let mut exact = ExactWriter { writer, name, left_bytes: bytes };
    source(&mut exact)?;
    match exact.left_bytes {
        0 => Ok(()),
        left_bytes => Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!(
                "the source of tensor `{name}` gave {} of {} bytes",
                Grouped(bytes - left_bytes),
                Grouped(bytes)
            ),
        )),
    }
}

struct ExactWriter<'a> {
    writer: &'a mut dyn Write,
    name: &'a str,
    left_bytes: u64,
}

impl Write for ExactWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.len() as u64 > self.left_bytes {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("the source of tensor `{}` gave more bytes than its shape needs", self.name),
            ));
        }
        let written = self.writer.write(bytes)?;
        self.left_bytes -= written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.writer.flush()
    }
}
