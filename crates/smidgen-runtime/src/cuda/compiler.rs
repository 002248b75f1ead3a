//! NVRTC: its version, the GPUs that it compiles for, and the target of a GPU's kernels.
//!
//! NVRTC 13 supports Turing (7.5) and newer, so Volta needs NVRTC 12. A GPU newer than NVRTC needs a newer NVRTC. Both
//! are errors with a remedy, reported before anything is compiled.
//! The kernels of a lower capability run on any newer GPU as PTX. If NVRTC has no target that low, its lowest target is
//! used with `-DCAPABILITY`, and the kernels still use only the instructions of the lower capability.

use super::driver::NAME;
use super::gpu_generation::{Capability, LEAST};
use crate::device::DeviceError;
use cudarc::nvrtc;

/// The NVRTC of this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compiler {
    /// Such as (13, 0).
    pub version: (i32, i32),
    /// The compute capabilities that it compiles for, in ascending order.
    pub capabilities: Vec<Capability>,
}

/// The architecture that kernels are compiled for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// NVRTC's name, such as `sm_90`, or `compute_75` for PTX.
    pub architecture: String,
    /// The option that lowers the capability below that of the architecture.
    pub definition: Option<String>,
}

impl Compiler {
    /// Queries NVRTC, whose library must have been found.
    pub fn query() -> Result<Compiler, DeviceError> {
        let version = compiler_version()?;
        let mut count = 0;
        // SAFETY: the pointer is valid for the call.
        let code = unsafe { nvrtc::sys::nvrtcGetNumSupportedArchs(&mut count) };
        code.result().map_err(|error| failed("nvrtcGetNumSupportedArchs", &error))?;
        let mut numbers = vec![0; count as usize];
        // SAFETY: the buffer has the size that NVRTC states.
        let code = unsafe { nvrtc::sys::nvrtcGetSupportedArchs(numbers.as_mut_ptr()) };
        code.result().map_err(|error| failed("nvrtcGetSupportedArchs", &error))?;
        let mut capabilities: Vec<Capability> =
            numbers.into_iter().map(|number| (number as u32 / 10, number as u32 % 10)).collect();
        capabilities.sort_unstable();
        Ok(Compiler { version, capabilities })
    }

    /// The remedy for a GPU that this NVRTC does not compile for; `None` if it does.
    pub fn remedy(&self, capability: Capability) -> Option<&'static str> {
        if self.capabilities.contains(&capability) {
            return None;
        }
        let is_old = self.capabilities.first().is_some_and(|least| capability < *least);
        Some(if is_old { OLD_GPU_REMEDY } else { NEW_GPU_REMEDY })
    }

    /// The target for a GPU of capability `own` that runs the kernels of capability `wanted`, which is the same or
    /// lower.
    pub fn target(&self, name: &str, own: Capability, wanted: Capability) -> Result<Target, DeviceError> {
        let text = |(major, minor): Capability| format!("{major}{minor}");
        let name = || name.to_owned();
        if wanted == own {
            if let Some(remedy) = self.remedy(own) {
                let ((major, minor), compiler) = (own, self.version);
                return Err(DeviceError::Compiler { name: name(), major, minor, compiler, remedy });
            }
            return Ok(Target { architecture: format!("sm_{}", text(own)), definition: None });
        }
        let between = |it: &&Capability| **it >= wanted && **it <= own;
        let target = self.capabilities.iter().find(between).filter(|_| wanted >= LEAST);
        let Some(target) = target else {
            return Err(DeviceError::AsCapability { name: name(), own, wanted });
        };
        let architecture = format!("compute_{}", text(*target));
        let definition = (*target != wanted).then(|| format!("-DCAPABILITY={}", text(wanted)));
        Ok(Target { architecture, definition })
    }
}

/// Version of NVRTC, such as (13, 0).
pub fn compiler_version() -> Result<(i32, i32), DeviceError> {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the pointers are valid for the call.
    let code = unsafe { nvrtc::sys::nvrtcVersion(&mut major, &mut minor) };
    code.result().map_err(|error| failed("nvrtcVersion", &error))?;
    Ok((major, minor))
}

fn failed(call: &'static str, error: &nvrtc::result::NvrtcError) -> DeviceError {
    DeviceError::Call { device: NAME, call, what: format!("{error:?}") }
}

/// For GPUs that CUDA 13 no longer supports, and for GPUs that are newer than NVRTC.
const OLD_GPU_REMEDY: &str = "install the libraries of CUDA 12 in place of those of CUDA 13: \
    `pip install nvidia-cuda-nvrtc-cu12 nvidia-cublas-cu12`";
const NEW_GPU_REMEDY: &str =
    "install newer libraries: `pip install --upgrade nvidia-cuda-nvrtc nvidia-cublas`";

#[cfg(test)]
mod tests {
    use super::*;

    fn of_12() -> Compiler {
        Compiler { version: (12, 9), capabilities: vec![(5, 0), (7, 0), (7, 5), (8, 0), (9, 0)] }
    }

    fn of_13() -> Compiler {
        Compiler { version: (13, 0), capabilities: vec![(7, 5), (8, 0), (9, 0), (12, 0)] }
    }

    fn target(compiler: &Compiler, own: Capability, wanted: Capability) -> Result<Target, String> {
        compiler.target("NVIDIA Example", own, wanted).map_err(|error| error.to_string())
    }

    fn expected(architecture: &str, definition: Option<&str>) -> Result<Target, String> {
        Ok(Target { architecture: architecture.to_owned(), definition: definition.map(str::to_owned) })
    }

    #[test]
    fn own_kernels_are_machine_code_and_those_of_older_gpus_are_ptx() {
        assert_eq!(target(&of_13(), (9, 0), (9, 0)), expected("sm_90", None));
        assert_eq!(target(&of_12(), (7, 0), (7, 0)), expected("sm_70", None));
        assert_eq!(target(&of_13(), (9, 0), (7, 5)), expected("compute_75", None));
        assert_eq!(target(&of_12(), (9, 0), (7, 0)), expected("compute_70", None));
        assert_eq!(target(&of_13(), (9, 0), (7, 0)), expected("compute_75", Some("-DCAPABILITY=70")));
    }

    #[test]
    fn what_nvrtc_does_not_compile_for_is_refused_with_a_remedy() {
        let volta = target(&of_13(), (7, 0), (7, 0)).unwrap_err();
        assert!(volta.contains("NVRTC 13.0") && volta.contains("nvidia-cuda-nvrtc-cu12"), "{volta}");
        let new = target(&of_12(), (12, 0), (12, 0)).unwrap_err();
        assert!(new.contains("NVRTC 12.9") && new.contains("--upgrade nvidia-cuda-nvrtc"), "{new}");
    }

    #[test]
    fn only_kernels_of_older_gpus_can_be_run_instead() {
        for wanted in [(10, 0), (6, 1), (9, 1)] {
            let refused = target(&of_13(), (9, 0), wanted).unwrap_err();
            assert!(refused.contains("7.0 to 9.0"), "{refused}");
        }
    }
}
