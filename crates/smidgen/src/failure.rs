//! The error type of the library and of every command: what went wrong, its cause, hints, and the exit code.
//!
//! Callers decide by [`FailureKind`], never by the text of a message. The exit code follows from it: 2 if the recipe or
//! the command is wrong, 130 if interrupted with the state saved, 1 for everything else, also for a run that does not
//! fit. Left out: colour and line width (`console/`).

use smidgen_formats::finite::NotFinite;
use smidgen_hub::{HubError, HubErrorKind};
use smidgen_recipe::{NoModelPath, ReadRecipeError, RecipeErrors};
use smidgen_runtime::DeviceError;
use smidgen_runtime::comm::CommError;
use smidgen_runtime::device::FillError;
use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::{fmt, io};

type BoxedError = Box<dyn Error + Send + Sync>;

/// What went wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureKind {
    /// A key or a value of the recipe.
    Recipe,
    /// The arguments of a command.
    Command,
    /// Rows to train on or to evaluate.
    Data,
    /// The files of a model, an adapter, a tokenizer or a checkpoint.
    Model,
    /// A GPU, its driver or its libraries; threads of the CPU device.
    Device,
    /// A file or folder cannot be read or written, exists already, or the disk is full.
    Disk,
    /// The run does not fit its budget, or uses more memory than planned.
    Memory,
    /// A download failed, or a port cannot be used.
    Network,
    /// Training itself, such as a loss that is not finite or an adapter that gets no gradient.
    Training,
    /// Another rank was lost or differs from this one, or ranks cannot reach each other.
    Ranks,
    /// Stopped by a signal, with the state saved.
    Interrupted,
}

impl FailureKind {
    /// The exit code of a command that fails with an error of this kind.
    pub fn exit_code(self) -> u8 {
        match self {
            FailureKind::Recipe | FailureKind::Command => 2,
            FailureKind::Interrupted => 130,
            FailureKind::Data
            | FailureKind::Model
            | FailureKind::Device
            | FailureKind::Disk
            | FailureKind::Memory
            | FailureKind::Network
            | FailureKind::Training
            | FailureKind::Ranks => 1,
        }
    }
}

/// An error with a message for the user, hints and the underlying cause.
///
/// `to_string` gives what the command line prints: `error:`, the message, and a `hint:` line each.
#[derive(Clone, Debug)]
pub struct Failure {
    /// What went wrong, for code.
    pub kind: FailureKind,
    /// What went wrong, for people.
    pub message: String,
    /// What the user can do about it.
    pub hints: Vec<String>,
    cause: Arc<dyn Error + Send + Sync>,
}

impl Failure {
    /// From an error, whose text becomes the message, or from a message.
    pub fn new(kind: FailureKind, cause: impl Into<BoxedError>) -> Failure {
        let cause: BoxedError = cause.into();
        Failure { kind, message: cause.to_string(), hints: Vec::new(), cause: cause.into() }
    }

    pub fn recipe(cause: impl Into<BoxedError>) -> Failure {
        Failure::new(FailureKind::Recipe, cause)
    }

    pub fn command(cause: impl Into<BoxedError>) -> Failure {
        Failure::new(FailureKind::Command, cause)
    }

    pub fn data(cause: impl Into<BoxedError>) -> Failure {
        Failure::new(FailureKind::Data, cause)
    }

    pub fn model(cause: impl Into<BoxedError>) -> Failure {
        Failure::new(FailureKind::Model, cause)
    }

    pub fn device(cause: impl Into<BoxedError>) -> Failure {
        Failure::new(FailureKind::Device, cause)
    }

    pub fn disk(cause: impl Into<BoxedError>) -> Failure {
        Failure::new(FailureKind::Disk, cause)
    }

    pub fn memory(cause: impl Into<BoxedError>) -> Failure {
        Failure::new(FailureKind::Memory, cause)
    }

    pub fn network(cause: impl Into<BoxedError>) -> Failure {
        Failure::new(FailureKind::Network, cause)
    }

    pub fn training(cause: impl Into<BoxedError>) -> Failure {
        Failure::new(FailureKind::Training, cause)
    }

    pub fn ranks(cause: impl Into<BoxedError>) -> Failure {
        Failure::new(FailureKind::Ranks, cause)
    }

    pub fn interrupted(cause: impl Into<BoxedError>) -> Failure {
        Failure::new(FailureKind::Interrupted, cause)
    }

    /// ``cannot write `path`: no space left on device``, with the verb given.
    pub fn file(verb: &str, path: &Path, error: impl Into<BoxedError>) -> Failure {
        Failure::disk(error).context(format!("cannot {verb} `{}`", path.display()))
    }

    /// From an error while tensors of a device were written to a file. The cause may be the disk, the device, or
    /// numbers that are not finite.
    pub fn writing(error: impl Error + Send + Sync + 'static) -> Failure {
        let first: &(dyn Error + 'static) = &error;
        let chain = std::iter::successors(Some(first), |&error| error.source());
        let mut inner = chain.filter_map(|error| error.downcast_ref::<io::Error>()?.get_ref());
        let found = inner.find_map(|error| match error.downcast_ref::<NotFinite>() {
            Some(not_finite) => Some(Err(not_finite.clone())),
            None => error.downcast_ref().map(|error| Ok(kind_of_device_error(error))),
        });
        match found {
            Some(Err(not_finite)) => Failure::training(not_finite)
                .context("nothing was saved")
                .hint("a lower `train.lr` is the usual remedy; checkpoints written before are intact"),
            Some(Ok(kind)) => Failure::new(kind, error),
            None => Failure::disk(error),
        }
    }

    /// Replaces the message and keeps the cause.
    pub fn reworded(mut self, message: impl fmt::Display) -> Failure {
        self.message = message.to_string();
        self
    }

    /// Prefixes the message with what was being done: ``doing: message``.
    pub fn context(mut self, doing: impl fmt::Display) -> Failure {
        self.message = format!("{doing}: {}", self.message);
        self
    }

    /// Adds a line below the message.
    pub fn detail(mut self, line: impl fmt::Display) -> Failure {
        self.message = format!("{}\n  {line}", self.message);
        self
    }

    pub fn hint(mut self, hint: impl fmt::Display) -> Failure {
        self.hints.push(hint.to_string());
        self
    }

    /// Removes the hints, for a caller with better ones.
    pub fn without_hints(mut self) -> Failure {
        self.hints.clear();
        self
    }

    pub fn hint_if_some(self, hint: Option<impl fmt::Display>) -> Failure {
        match hint {
            Some(hint) => self.hint(hint),
            None => self,
        }
    }

    /// The underlying error, if it has this type.
    pub fn cause<E: Error + 'static>(&self) -> Option<&E> {
        self.cause.downcast_ref()
    }

    /// The exit code of a command that fails with this error.
    pub fn exit_code(&self) -> u8 {
        self.kind.exit_code()
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "error: {}", self.message)?;
        if !self.hints.is_empty() {
            writeln!(f)?;
        }
        for hint in &self.hints {
            write!(f, "\nhint: {hint}")?;
        }
        Ok(())
    }
}

impl Error for Failure {
    /// The message includes that of the cause, so the chain continues with the source of the cause.
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.cause.source()
    }
}

fn kind_of_device_error(error: &DeviceError) -> FailureKind {
    match error {
        DeviceError::Reserve { .. } | DeviceError::Pinned { .. } => FailureKind::Memory,
        DeviceError::File { .. } => FailureKind::Disk,
        DeviceError::Storage { .. }
        | DeviceError::Columns { .. }
        | DeviceError::Workspace { .. }
        | DeviceError::Space { .. }
        | DeviceError::Precision { .. }
        | DeviceError::Call { .. }
        | DeviceError::Compile { .. }
        | DeviceError::NoSuchGpu { .. }
        | DeviceError::Library { .. }
        | DeviceError::Capability { .. }
        | DeviceError::AsCapability { .. }
        | DeviceError::Compiler { .. }
        | DeviceError::OldDriver { .. }
        | DeviceError::Extent { .. }
        | DeviceError::NoOtherRanks { .. }
        | DeviceError::Violation(_) => FailureKind::Device,
        DeviceError::Comm(error) => kind_of_comm_error(error),
    }
}

fn kind_of_comm_error(error: &CommError) -> FailureKind {
    match error {
        CommError::Call { .. } | CommError::World { .. } => FailureKind::Ranks,
        CommError::Missing { .. }
        | CommError::Open { .. }
        | CommError::Symbol { .. }
        | CommError::Abi { .. }
        | CommError::AbiVersion { .. }
        | CommError::Threads { .. }
        | CommError::Again => FailureKind::Device,
    }
}

impl From<DeviceError> for Failure {
    fn from(error: DeviceError) -> Failure {
        Failure::new(kind_of_device_error(&error), error)
    }
}

impl From<CommError> for Failure {
    fn from(error: CommError) -> Failure {
        let remedy = error.remedy();
        Failure::new(kind_of_comm_error(&error), error).hint_if_some(remedy)
    }
}

impl From<HubError> for Failure {
    fn from(error: HubError) -> Failure {
        let kind = match error.kind {
            HubErrorKind::Name => FailureKind::Recipe,
            HubErrorKind::Network => FailureKind::Network,
            HubErrorKind::Model => FailureKind::Model,
            HubErrorKind::Data => FailureKind::Data,
            HubErrorKind::Disk => FailureKind::Disk,
        };
        let HubError { message, hints, cause, .. } = error;
        Failure { kind, message, hints, cause: cause.into() }
    }
}

impl From<ReadRecipeError> for Failure {
    fn from(error: ReadRecipeError) -> Failure {
        Failure::recipe(error)
    }
}

impl From<RecipeErrors> for Failure {
    fn from(errors: RecipeErrors) -> Failure {
        Failure::recipe(errors)
    }
}

impl From<NoModelPath> for Failure {
    fn from(error: NoModelPath) -> Failure {
        Failure::recipe(error)
    }
}

impl<E: Error + Send + Sync + 'static> From<FillError<E>> for Failure {
    fn from(error: FillError<E>) -> Failure {
        match error {
            FillError::Source(error) => Failure::model(error),
            FillError::Device(error) => Failure::from(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use smidgen_formats::whole_file::write_whole;

    #[test]
    fn the_exit_code_follows_from_the_kind() {
        assert_eq!(Failure::recipe("x").exit_code(), 2);
        assert_eq!(Failure::command("x").exit_code(), 2);
        assert_eq!(Failure::memory("x").exit_code(), 1);
        assert_eq!(Failure::interrupted("x").exit_code(), 130);
    }

    #[test]
    fn the_cause_is_kept() {
        let full = io::Error::from(io::ErrorKind::StorageFull);
        let failure = Failure::file("write", Path::new("a/b"), full);
        assert_eq!(failure.kind, FailureKind::Disk);
        assert!(failure.message.starts_with("cannot write `a/b`: "), "{failure}");
        assert_eq!(failure.cause::<io::Error>().map(io::Error::kind), Some(io::ErrorKind::StorageFull));
        let lost = DeviceError::Call { device: "cuda", call: "cuLaunchKernel", what: "lost".into() };
        assert_eq!(Failure::from(lost).kind, FailureKind::Device);
        assert_eq!(Failure::from(DeviceError::Reserve { device: "cpu", bytes: 1 }).kind, FailureKind::Memory);
    }

    #[test]
    fn a_device_error_while_writing_a_file_is_not_a_disk_error() {
        let folder = tempfile::tempdir().unwrap();
        let write = |error: fn() -> io::Error| {
            Failure::writing(write_whole(&folder.path().join("a"), |_| Err(error())).unwrap_err())
        };
        let lost = || {
            let error = DeviceError::Call { device: "cuda", call: "cuMemcpyDtoH", what: "lost".into() };
            io::Error::other(error)
        };
        assert_eq!(write(lost).kind, FailureKind::Device);
        assert_eq!(write(|| io::ErrorKind::StorageFull.into()).kind, FailureKind::Disk);
    }

    #[test]
    fn hints_follow_the_message() {
        let failure = Failure::model("no `config.json`").context("`m`").hint("download it");
        assert_eq!(failure.to_string(), "error: `m`: no `config.json`\n\nhint: download it");
    }
}
