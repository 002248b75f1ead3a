//! Finds MPI: the library with the standard ABI, and the `mpiexec` that starts its ranks.
//!
//! The library must match the launcher that started the process, so the one next to that launcher is tried first, then
//! those found through `SMIDGEN_MPIEXEC`, the loader's path, PATH and pip's folders. An MPI without the standard ABI is
//! recognized, so that the error can name it.
//! Left out: environment modules and compiler wrappers; a loaded module puts its `mpiexec` on PATH.

use super::CommError;
use super::mpi_abi::Abi;
use crate::python_roots::{begins, python_roots};
use libloading::os::unix::{Library, RTLD_LAZY, RTLD_LOCAL};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const LIBRARY: &str = "libmpi_abi.so.1";

/// Names an `mpiexec` to use, and the MPI library next to it.
pub const MPIEXEC_VARIABLE: &str = "SMIDGEN_MPIEXEC";

const REMEDY: &str = "`pip install mpich` installs it and its `mpiexec`; \
                      `SMIDGEN_MPIEXEC=/path/to/mpiexec` names one outside PATH";

/// The MPI implementation that an `mpiexec` belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Maker {
    Mpich,
    Intel,
    OpenMpi,
    Unknown,
}

/// A launcher of MPI ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mpiexec {
    pub path: PathBuf,
    pub maker: Maker,
    /// The line of its output that states the version.
    pub version: String,
}

/// The first `mpiexec` that can start ranks of an MPI with the standard ABI.
pub fn find_mpiexec() -> Result<Mpiexec, CommError> {
    match std::env::var_os(MPIEXEC_VARIABLE) {
        Some(path) if !path.is_empty() => {
            let path = PathBuf::from(path);
            let why = format!("{MPIEXEC_VARIABLE} does not name a program that can be run");
            choose([ask(&path).ok_or(CommError::Open { path, why })?].into_iter())
        }
        _ => choose(mpiexecs().iter().filter_map(|path| ask(path))),
    }
}

pub(super) fn open_library() -> Result<Abi, CommError> {
    let mut folders = Vec::new();
    folders.extend(parent_program().and_then(|program| library_folder(&program)));
    if let Some(path) = std::env::var_os(MPIEXEC_VARIABLE) {
        folders.extend(library_folder(Path::new(&path)));
    }
    if let Some(path) = find_file(&folders, LIBRARY) {
        return Abi::open(&path);
    }
    match Abi::open(Path::new(LIBRARY)) {
        Err(CommError::Open { .. }) => {}
        opened => return opened,
    }
    folders.extend(mpiexecs().iter().filter_map(|path| library_folder(path)));
    folders.extend(python_roots().iter().map(|root| root.join("lib")));
    if let Some(path) = find_file(&folders, LIBRARY) {
        return Abi::open(&path);
    }
    Err(match without_standard_abi(&folders) {
        Some(found) => CommError::Abi { found },
        None => CommError::Missing { what: "MPI", file: LIBRARY, remedy: REMEDY },
    })
}

fn find_file(folders: &[PathBuf], file: &str) -> Option<PathBuf> {
    folders.iter().map(|folder| folder.join(file)).find(|path| path.exists())
}

fn choose(found: impl Iterator<Item = Mpiexec>) -> Result<Mpiexec, CommError> {
    let mut refused = None;
    for mpiexec in found {
        match mpiexec.maker {
            Maker::Mpich | Maker::Intel => return Ok(mpiexec),
            Maker::OpenMpi | Maker::Unknown => refused = refused.or(Some(mpiexec)),
        }
    }
    Err(match refused {
        Some(Mpiexec { path, maker: Maker::OpenMpi, version }) => {
            CommError::Abi { found: format!("Open MPI (`{}`, {version})", path.display()) }
        }
        Some(Mpiexec { path, version, .. }) => {
            CommError::Abi { found: format!("the MPI of `{}` ({version})", path.display()) }
        }
        None => CommError::Missing { what: "an MPI launcher", file: "mpiexec", remedy: REMEDY },
    })
}

/// Every `mpiexec` on PATH and in pip's folders.
fn mpiexecs() -> Vec<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut folders: Vec<PathBuf> = std::env::split_paths(&path).collect();
    folders.extend(python_roots().iter().map(|root| root.join("bin")));
    let mut found: Vec<PathBuf> =
        folders.iter().map(|folder| folder.join("mpiexec")).filter(|path| path.is_file()).collect();
    let mut seen = std::collections::HashSet::new();
    found.retain(|path| seen.insert(path.clone()));
    found
}

/// Runs a launcher to learn its version; `None` if it cannot be run.
fn ask(path: &Path) -> Option<Mpiexec> {
    let output =
        Command::new(path).arg("--version").stdin(Stdio::null()).stderr(Stdio::null()).output().ok()?;
    let (maker, version) = read_version(&String::from_utf8_lossy(&output.stdout));
    Some(Mpiexec { path: path.to_owned(), maker, version })
}

fn read_version(text: &str) -> (Maker, String) {
    let line = |with: &str| text.lines().find(|line| line.contains(with)).map(|line| line.trim().to_owned());
    if let Some(line) = line("Open MPI").or_else(|| line("OpenRTE")) {
        (Maker::OpenMpi, line)
    } else if let Some(line) = line("Intel(R) MPI") {
        (Maker::Intel, line)
    } else if text.contains("HYDRA") {
        let version = line("Version:").unwrap_or_default();
        (Maker::Mpich, format!("Hydra {}", version.trim_start_matches("Version:").trim()))
    } else {
        (Maker::Unknown, text.lines().next().unwrap_or("unknown version").trim().to_owned())
    }
}

/// The program that started this process, if it is part of an MPI, as it is under `mpiexec`.
fn parent_program() -> Option<PathBuf> {
    let parent = std::os::unix::process::parent_id();
    let program = std::fs::read_link(format!("/proc/{parent}/exe")).ok()?;
    let is_mpi = begins(&program, "hydra") || begins(&program, "mpiexec");
    is_mpi.then_some(program)
}

/// The `lib` folder next to the program's `bin` folder; if that has no MPI library, the one next to the program's link
/// target.
fn library_folder(program: &Path) -> Option<PathBuf> {
    let lib = |program: &Path| Some(program.parent()?.parent()?.join("lib"));
    let direct = lib(program).filter(|folder| folder.join(LIBRARY).exists());
    direct.or_else(|| lib(&program.canonicalize().ok()?))
}

/// Describes an installed MPI without the standard ABI, if there is one.
fn without_standard_abi(folders: &[PathBuf]) -> Option<String> {
    const OTHERS: [(&str, &str); 2] =
        [("libmpi.so.40", "Open MPI"), ("libmpi.so.12", "this version of MPICH or Intel MPI")];
    for (file, name) in OTHERS {
        if let Some(path) = find_file(folders, file) {
            return Some(format!("{name} (`{}`)", path.display()));
        }
    }
    // SAFETY: the initializers of an MPI library need nothing from this process.
    let opens = |file: &str| unsafe { Library::open(Some(file), RTLD_LAZY | RTLD_LOCAL) }.is_ok();
    let (file, name) = OTHERS.into_iter().find(|(file, _)| opens(file))?;
    Some(format!("{name} (`{file}`)"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(maker: Maker) -> Mpiexec {
        Mpiexec { path: PathBuf::from("/usr/bin/mpiexec"), maker, version: "v".into() }
    }

    #[test]
    fn makers_are_recognized() {
        let hydra = "HYDRA build details:\n    Version:                                 5.0.2\n";
        assert_eq!(read_version(hydra), (Maker::Mpich, "Hydra 5.0.2".into()));
        let intel = "Intel(R) MPI Library for Linux* OS, Version 2021.19.0 Build 20260929\nCopyright";
        assert_eq!(read_version(intel).0, Maker::Intel);
        assert_eq!(read_version("mpiexec (Open MPI) 5.0.11\n").0, Maker::OpenMpi);
        assert_eq!(read_version("mpiexec (OpenRTE) 4.1.2\n").0, Maker::OpenMpi);
        assert_eq!(read_version("").0, Maker::Unknown);
    }

    #[test]
    fn open_mpi_is_passed_over_and_refused_by_name_if_it_is_the_only_one() {
        let chosen = choose([of(Maker::OpenMpi), of(Maker::Intel)].into_iter());
        assert_eq!(chosen.unwrap().maker, Maker::Intel);
        let refused = choose([of(Maker::OpenMpi)].into_iter()).unwrap_err();
        assert!(refused.to_string().starts_with("Open MPI (`/usr/bin/mpiexec`"), "{refused}");
        assert!(refused.remedy().unwrap().contains("pip install mpich"));
        let missing = choose(std::iter::empty()).unwrap_err();
        assert!(matches!(missing, CommError::Missing { .. }), "{missing}");
    }

    #[test]
    fn a_library_without_the_standard_abi_is_named() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("libmpi.so.40"), "").unwrap();
        let found = without_standard_abi(&[folder.path().to_owned()]).unwrap();
        assert!(found.starts_with("Open MPI (`"), "{found}");
    }

    #[test]
    fn the_library_is_next_to_the_launcher() {
        let root = tempfile::tempdir().unwrap();
        for part in ["bin", "lib"] {
            std::fs::create_dir(root.path().join(part)).unwrap();
        }
        let (program, library) = (root.path().join("bin/mpiexec"), root.path().join("lib").join(LIBRARY));
        std::fs::write(&program, "").unwrap();
        std::fs::write(&library, "").unwrap();
        let folder = library_folder(&program).unwrap();
        assert_eq!(folder.join(LIBRARY), library);
    }
}
