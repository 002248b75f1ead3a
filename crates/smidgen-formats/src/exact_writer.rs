//! A writer that takes exactly the bytes of one tensor.
//! A source that gives one byte too many would move every tensor behind it, and the file would still parse.
//! Left out: too few bytes, which only the caller knows the end of (`left_bytes`).

use std::io::{self, Write};

/// Refuses bytes beyond the tensor's end, which would move every later tensor.
pub(crate) struct ExactWriter<'a> {
    pub writer: &'a mut dyn Write,
    pub name: &'a str,
    pub left_bytes: u64,
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
