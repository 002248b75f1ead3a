//! Checksums of downloaded files: SHA-256, or the git id of small files on the Hugging Face hub.
//!
//! The hub gives both in hexadecimal and uses them as file names in its cache; wheels give SHA-256 in base64.
//! A git id is the SHA-1 of the length and the bytes: it protects against damage, not against an attacker.

use std::io;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::digest::{Context, SHA1_FOR_LEGACY_USE_ONLY, SHA256};

/// The expected hash of a file, in lower-case hexadecimal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Checksum {
    Sha256(String),
    GitBlob(String),
}

pub struct Hasher(Context);

impl Checksum {
    pub fn sha256(hex: &str) -> Option<Checksum> {
        is_hex(hex, 64).then(|| Checksum::Sha256(hex.to_owned()))
    }

    pub fn git_blob(hex: &str) -> Option<Checksum> {
        is_hex(hex, 40).then(|| Checksum::GitBlob(hex.to_owned()))
    }

    /// The checksum, which is also the file's name in the hub's cache.
    pub fn hex(&self) -> &str {
        match self {
            Checksum::Sha256(hex) | Checksum::GitBlob(hex) => hex,
        }
    }

    pub fn kind(&self) -> &'static str {
        match self {
            Checksum::Sha256(_) => "sha256",
            Checksum::GitBlob(_) => "git id",
        }
    }

    /// A hasher for a file of `file_bytes`.
    pub fn hasher(&self, file_bytes: u64) -> Hasher {
        match self {
            Checksum::Sha256(_) => Hasher::sha256(),
            Checksum::GitBlob(_) => {
                let mut context = Context::new(&SHA1_FOR_LEGACY_USE_ONLY);
                context.update(format!("blob {file_bytes}\0").as_bytes());
                Hasher(context)
            }
        }
    }
}

impl Hasher {
    pub fn sha256() -> Hasher {
        Hasher(Context::new(&SHA256))
    }

    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    pub fn finish_hex(self) -> String {
        self.0.finish().as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// In the URL-safe alphabet without padding, as in a wheel's RECORD.
    pub fn finish_base64(self) -> String {
        URL_SAFE_NO_PAD.encode(self.0.finish())
    }
}

/// Lets `io::copy` hash what a reader returns.
impl io::Write for Hasher {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Whether the text is lower-case hexadecimal with this number of digits, such as a commit or a checksum.
pub fn is_hex(text: &str, digits: usize) -> bool {
    text.len() == digits && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `sha256sum` of three bytes, and `git hash-object` of the same file.
    #[test]
    fn known_checksums() {
        let sha256 = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        let git = "f2ba8f84ab5c1bce84a7b441cb1959cfc7093b7f";
        for checksum in [Checksum::sha256(sha256).unwrap(), Checksum::git_blob(git).unwrap()] {
            let mut hasher = checksum.hasher(3);
            hasher.update(b"a");
            hasher.update(b"bc");
            assert_eq!(hasher.finish_hex(), checksum.hex());
        }
        let mut hasher = Hasher::sha256();
        hasher.update(b"abc");
        assert_eq!(hasher.finish_base64(), "ungWv48Bz-pBQUDeXa4iI7ADYaOWF3qctBD_YfIAFa0");
    }

    #[test]
    fn other_texts_are_not_checksums() {
        for text in ["", "abc", &"g".repeat(64), &"A".repeat(64), &"../".repeat(21), &"a".repeat(65)] {
            assert_eq!(Checksum::sha256(text), None, "{text}");
            assert_eq!(Checksum::git_blob(text), None, "{text}");
        }
    }
}
