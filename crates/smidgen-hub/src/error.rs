//! Why a model or a data set could not be located: what went wrong, in words, with hints for the user.
//!
//! Callers decide by [`HubErrorKind`], never by the text of a message.
//! Left out: exit codes and how an error is printed.

use std::error::Error;
use std::path::Path;
use std::{fmt, io};

type BoxedError = Box<dyn Error + Send + Sync>;

/// What went wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HubErrorKind {
    /// A name that is not the name of a model.
    Name,
    /// A server or pip refused or could not be reached, or sent something else than it announced.
    Network,
    /// The model has no usable files, or they are damaged.
    Model,
    /// The data set does not exist, or has no such config or split.
    Data,
    /// A file or folder could not be read or written.
    Disk,
}

#[derive(Debug)]
pub struct HubError {
    pub kind: HubErrorKind,
    pub message: String,
    /// What the user can do about it.
    pub hints: Vec<String>,
    /// The error that the message was made of.
    pub cause: BoxedError,
}

impl HubError {
    /// From an error or from a message.
    fn new(kind: HubErrorKind, cause: impl Into<BoxedError>) -> HubError {
        let cause = cause.into();
        HubError { kind, message: cause.to_string(), hints: Vec::new(), cause }
    }

    pub(crate) fn name(cause: impl Into<BoxedError>) -> HubError {
        HubError::new(HubErrorKind::Name, cause)
    }

    pub(crate) fn network(cause: impl Into<BoxedError>) -> HubError {
        HubError::new(HubErrorKind::Network, cause)
    }

    pub(crate) fn model(cause: impl Into<BoxedError>) -> HubError {
        HubError::new(HubErrorKind::Model, cause)
    }

    pub(crate) fn data(cause: impl Into<BoxedError>) -> HubError {
        HubError::new(HubErrorKind::Data, cause)
    }

    pub(crate) fn disk(cause: impl Into<BoxedError>) -> HubError {
        HubError::new(HubErrorKind::Disk, cause)
    }

    /// ``cannot read `path`: permission denied``, with the verb given.
    pub(crate) fn file(verb: &str, path: &Path, error: io::Error) -> HubError {
        HubError::disk(error).context(format!("cannot {verb} `{}`", path.display()))
    }

    /// A file that could not be written, with a hint if the disk is full or the folder read-only.
    pub(crate) fn not_written(path: &Path, error: io::Error) -> HubError {
        let kind = error.kind();
        let failed = HubError::file("write", path, error);
        match kind {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                failed.hint("free some space, or set `HF_HOME` and `SMIDGEN_CACHE` to a larger disk")
            }
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                failed.hint("set `HF_HOME` and `SMIDGEN_CACHE` to writable folders")
            }
            _ => failed,
        }
    }

    /// Prefixes the message with what was being done: ``doing: message``.
    pub(crate) fn context(mut self, doing: impl fmt::Display) -> HubError {
        self.message = format!("{doing}: {}", self.message);
        self
    }

    /// Adds a line below the message.
    pub(crate) fn detail(mut self, line: impl fmt::Display) -> HubError {
        self.message = format!("{}\n  {line}", self.message);
        self
    }

    pub(crate) fn hint(mut self, hint: impl fmt::Display) -> HubError {
        self.hints.push(hint.to_string());
        self
    }
}

impl fmt::Display for HubError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl Error for HubError {
    /// The message includes that of the cause, so the chain continues with the source of the cause.
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.cause.source()
    }
}
