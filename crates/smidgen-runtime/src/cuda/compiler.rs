//! NVRTC: its version, the GPUs that it compiles for, and the target of a GPU's kernels.
//!
//! NVRTC 13 begins with Turing (7.5), so Volta needs NVRTC 12; a GPU newer than NVRTC needs a newer one. Both are errors
//! with a remedy, before anything is compiled.
//! The kernels of a lower capability run on any newer GPU as PTX. Where NVRTC has no target that low, its lowest one is
//! used with `-DCAPABILITY`: the instructions are still those of the lower capability.

use super::driver::{Gpu, NAME};
use super::generation::{Capability, LEAST};
use crate::device::DeviceError;
use cudarc::nvrtc;

/// Version of NVRTC, such as (13, 0).
pub fn compiler_version() -> Result<(i32, i32), DeviceError> {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the pointers are valid for the call.
    let code = unsafe { nvrtc::sys::nvrtcVersion(&mut major, &mut minor) };
    code.result().map_err(|error| failed("nvrtcVersion", &error))?;
    Ok((major, minor))
}

/// The capabilities that NVRTC compiles for, in ascending order.
pub fn compiled_capabilities() -> Result<Vec<Capability>, DeviceError> {
    let mut count = 0;
    // SAFETY: the pointer is valid for the call.
    let code = unsafe { nvrtc::sys::nvrtcGetNumSupportedArchs(&mut count) };
    code.result().map_err(|error| failed("nvrtcGetNumSupportedArchs", &error))?;
    let mut numbers = vec![0; count as usize];
    // SAFETY: the buffer has the size that NVRTC states.
    let code = unsafe { nvrtc::sys::nvrtcGetSupportedArchs(numbers.as_mut_ptr()) };
    code.result().map_err(|error| failed("nvrtcGetSupportedArchs", &error))?;
    let mut all: Vec<Capability> =
        numbers.iter().map(|number| (*number as u32 / 10, *number as u32 % 10)).collect();
    all.sort_unstable();
    Ok(all)
}

fn failed(call: &'static str, error: &nvrtc::result::NvrtcError) -> DeviceError {
    DeviceError::Call { device: NAME, call, what: format!("{error:?}") }
}

/// What kernels are compiled for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// NVRTC's name, such as `sm_90`, or `compute_75` for PTX.
    pub architecture: String,
    /// The option that lowers the capability below that of the architecture.
    pub definition: Option<String>,
}

/// The target of a GPU's kernels, or of those of a lower capability.
pub fn target_of(gpu: &Gpu, capability: Capability) -> Result<Target, DeviceError> {
    choose_target(&gpu.name, gpu.capability, capability, compiler_version()?, &compiled_capabilities()?)
}

fn choose_target(
    name: &str,
    own: Capability,
    wanted: Capability,
    compiler: (i32, i32),
    known: &[Capability],
) -> Result<Target, DeviceError> {
    let text = |(major, minor): Capability| format!("{major}{minor}");
    if wanted != own {
        if wanted > own || wanted < LEAST {
            return Err(DeviceError::AsCapability { name: name.to_owned(), own, wanted });
        }
        let target = known.iter().find(|it| **it >= wanted && **it <= own).copied();
        let target = target.ok_or_else(|| not_compiled(name, own, compiler, known))?;
        let architecture = format!("compute_{}", text(target));
        let definition = (target != wanted).then(|| format!("-DCAPABILITY={}", text(wanted)));
        return Ok(Target { architecture, definition });
    }
    if !known.contains(&own) {
        return Err(not_compiled(name, own, compiler, known));
    }
    Ok(Target { architecture: format!("sm_{}", text(own)), definition: None })
}

fn not_compiled(
    name: &str,
    (major, minor): Capability,
    compiler: (i32, i32),
    known: &[Capability],
) -> DeviceError {
    let least = known.first().copied().unwrap_or(LEAST);
    let remedy = match (major, minor) < least {
        true => VOLTA_REMEDY,
        false => {
            "install a newer NVRTC and cuBLASLt: `pip install --upgrade nvidia-cuda-nvrtc nvidia-cublas`"
        }
    };
    DeviceError::Compiler { name: name.to_owned(), major, minor, compiler, remedy }
}

/// For GPUs that CUDA 13 has left behind.
pub const VOLTA_REMEDY: &str = "install the libraries of CUDA 12 in place of those of 13: \
    `pip install nvidia-cuda-nvrtc-cu12 nvidia-cublas-cu12`";

#[cfg(test)]
mod tests {
    use super::*;

    const OF_12: [Capability; 5] = [(5, 0), (7, 0), (7, 5), (8, 0), (9, 0)];
    const OF_13: [Capability; 4] = [(7, 5), (8, 0), (9, 0), (12, 0)];

    fn target(own: Capability, wanted: Capability, known: &[Capability]) -> Result<Target, String> {
        choose_target("NVIDIA Example", own, wanted, (13, 0), known).map_err(|error| error.to_string())
    }

    fn made(architecture: &str, definition: Option<&str>) -> Result<Target, String> {
        Ok(Target { architecture: architecture.to_owned(), definition: definition.map(str::to_owned) })
    }

    #[test]
    fn a_gpu_gets_machine_code_and_an_older_one_on_it_ptx() {
        assert_eq!(target((9, 0), (9, 0), &OF_13), made("sm_90", None));
        assert_eq!(target((7, 0), (7, 0), &OF_12), made("sm_70", None));
        assert_eq!(target((9, 0), (7, 5), &OF_13), made("compute_75", None));
        assert_eq!(target((9, 0), (7, 0), &OF_12), made("compute_70", None));
        assert_eq!(target((9, 0), (7, 0), &OF_13), made("compute_75", Some("-DCAPABILITY=70")));
    }

    #[test]
    fn what_nvrtc_does_not_compile_for_is_refused_with_a_remedy() {
        let volta = target((7, 0), (7, 0), &OF_13).unwrap_err();
        assert!(volta.contains("NVRTC 13.0") && volta.contains("nvidia-cuda-nvrtc-cu12"), "{volta}");
        let new = target((12, 0), (12, 0), &OF_12).unwrap_err();
        assert!(new.contains("--upgrade nvidia-cuda-nvrtc"), "{new}");
    }

    #[test]
    fn only_an_older_gpu_can_be_taken_for_this_one() {
        for wanted in [(10, 0), (6, 1), (9, 1)] {
            let refused = target((9, 0), wanted, &OF_13).unwrap_err();
            assert!(refused.contains("7.0 to 9.0"), "{refused}");
        }
    }
}
