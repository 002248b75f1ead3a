//! Environment variables that people set for other trainers: which of them affect smidgen, and which do not.
//!
//! Variables of PyTorch's allocator and of other thread pools are often left over. They have no effect, because the
//! plan allocates all memory and `memory.threads` sets the threads. A variable that hides a GPU, loads another library
//! or slows every kernel launch is a warning with a remedy.
//! Left out: the variables that this program reads itself, such as `HF_HOME` and `SMIDGEN_CACHE`.

use super::Check;
use serde_json::json;
use std::path::Path;

const NAME: &str = "environment";

/// Variables without effect on smidgen, and what it uses instead.
const NO_EFFECT: &[(&[&str], &str)] = &[
    (
        &[
            "PYTORCH_CUDA_ALLOC_CONF",
            "PYTORCH_ALLOC_CONF",
            "PYTORCH_HIP_ALLOC_CONF",
            "PYTORCH_NO_CUDA_MEMORY_CACHING",
        ],
        "the plan allocates all memory",
    ),
    (
        &[
            "OMP_NUM_THREADS",
            "MKL_NUM_THREADS",
            "OPENBLAS_NUM_THREADS",
            "NUMEXPR_NUM_THREADS",
            "RAYON_NUM_THREADS",
        ],
        "`memory.threads` sets the threads",
    ),
    (
        &["OMP_PROC_BIND", "KMP_AFFINITY", "KMP_BLOCKTIME", "TOKENIZERS_PARALLELISM"],
        "`memory.threads` sets the threads",
    ),
    (&["CUBLAS_WORKSPACE_CONFIG"], "workspaces are part of the plan"),
    (&["TRANSFORMERS_CACHE", "HF_DATASETS_CACHE"], "`HF_HOME` is read"),
    (
        &[
            "WANDB_PROJECT",
            "WANDB_API_KEY",
            "WANDB_MODE",
            "WANDB_DISABLED",
            "MLFLOW_TRACKING_URI",
            "COMET_MODE",
        ],
        "a run writes only to its own folder",
    ),
    (
        &[
            "HF_HUB_DISABLE_TELEMETRY",
            "DISABLE_TELEMETRY",
            "DO_NOT_TRACK",
            "ANONYMIZED_TELEMETRY",
            "UNSLOTH_DISABLE_STATISTICS",
            "AXOLOTL_DO_NOT_TRACK",
        ],
        "smidgen sends nothing about its use",
    ),
    (
        &[
            "ACCELERATE_USE_DEEPSPEED",
            "ACCELERATE_USE_FSDP",
            "ACCELERATE_MIXED_PRECISION",
            "DS_SKIP_CUDA_CHECK",
        ],
        "the recipe sets this",
    ),
];

/// Variables of the C library's allocator: they change the memory that the process uses outside its plan.
const HEAP: &[&str] = &[
    "MALLOC_ARENA_MAX",
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_MMAP_MAX_",
    "MALLOC_TOP_PAD_",
    "GLIBC_TUNABLES",
    "LD_PRELOAD",
];

/// Checks the variables of this process.
pub fn check(wants_gpu: bool) -> Check {
    let read = |name: &str| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
    environment_line(&read, &|folder| Path::new(folder).is_dir(), wants_gpu)
}

struct Found {
    findings: Vec<String>,
    remedies: Vec<String>,
    /// Names of the variables that affect smidgen.
    matters: Vec<&'static str>,
}

impl Found {
    fn warn(&mut self, name: &'static str, finding: String, remedy: &str) {
        self.findings.push(finding);
        self.remedies.push(remedy.to_owned());
        self.matters.push(name);
    }
}

/// `read` gives a variable, `is_folder` says whether a folder exists.
fn environment_line(
    read: &dyn Fn(&str) -> Option<String>,
    is_folder: &dyn Fn(&str) -> bool,
    wants_gpu: bool,
) -> Check {
    let set = |name: &str| read(name).filter(|value| !value.is_empty());
    let mut found = Found { findings: Vec::new(), remedies: Vec::new(), matters: Vec::new() };
    check_gpu_variables(read, wants_gpu, &mut found);
    check_folder_variables(&set, is_folder, &mut found);
    for name in HEAP.iter().filter(|name| set(name).is_some()) {
        found.warn(
            name,
            format!("`{name}` changes how much host memory the process uses, which the plan does not know"),
            "unset it if a run uses more host memory than its plan",
        );
    }
    if let Some(count) = set("WORLD_SIZE").filter(|count| count.parse::<u64>().is_ok_and(|count| count > 1)) {
        found.warn(
            "WORLD_SIZE",
            format!("`WORLD_SIZE={count}`: `smidgen train` would start as one of {count} ranks and wait for the others"),
            "unset `WORLD_SIZE` and `RANK` to train with one process",
        );
    }
    let unused: Vec<(&str, &str)> = NO_EFFECT
        .iter()
        .flat_map(|(names, why)| names.iter().map(move |name| (*name, *why)))
        .filter(|(name, _)| set(name).is_some())
        .collect();
    for why in unused.iter().map(|(_, why)| *why).collect::<std::collections::BTreeSet<_>>() {
        let names = unused.iter().filter(|(_, of)| *of == why).map(|(name, _)| format!("`{name}`"));
        found
            .findings
            .push(format!("no effect on smidgen: {} ({why})", names.collect::<Vec<_>>().join(", ")));
    }
    let facts = json!({
        "matters": found.matters,
        "no_effect": unused.iter().map(|(name, _)| *name).collect::<Vec<_>>(),
    });
    let finding = match found.findings.is_empty() {
        true => "no variable is set that affects smidgen".to_owned(),
        false => found.findings.join("\n"),
    };
    let verdict =
        if found.matters.is_empty() { Check::pass(NAME, finding) } else { Check::warn(NAME, finding, "") };
    Check { remedies: found.remedies, ..verdict }.with(facts)
}

/// Variables of the driver and of NVIDIA's containers.
fn check_gpu_variables(read: &dyn Fn(&str) -> Option<String>, wants_gpu: bool, found: &mut Found) {
    for name in ["CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"] {
        let Some(value) = read(name) else { continue };
        let is_container = name.starts_with("NVIDIA");
        let hides_all = ["-1", "none", "void", "NoDevFiles"].contains(&value.as_str());
        if hides_all || (value.is_empty() && !is_container) {
            let need = if wants_gpu { ", and the recipe needs one" } else { "" };
            found.warn(
                name,
                format!("`{name}={value}` hides every GPU{need}"),
                &format!("unset `{name}` to train on a GPU"),
            );
        } else if !is_container && value != "0" {
            found.findings.push(format!("`{name}={value}`: `cuda:0` is the first of these"));
        }
    }
    let is_on = |name: &str| read(name).is_some_and(|value| !["", "0"].contains(&value.as_str()));
    if is_on("CUDA_LAUNCH_BLOCKING") {
        found.warn(
            "CUDA_LAUNCH_BLOCKING",
            "`CUDA_LAUNCH_BLOCKING` makes the driver wait for every kernel, which slows training down"
                .to_owned(),
            "unset `CUDA_LAUNCH_BLOCKING`",
        );
    }
    if let Some(value) = read("NVIDIA_TF32_OVERRIDE").filter(|value| !value.is_empty()) {
        found.warn(
            "NVIDIA_TF32_OVERRIDE",
            format!("`NVIDIA_TF32_OVERRIDE={value}` changes the arithmetic of cuBLAS, so results differ"),
            "unset `NVIDIA_TF32_OVERRIDE`",
        );
    }
}

/// Variables with folders in which libraries are searched.
fn check_folder_variables(
    set: &dyn Fn(&str) -> Option<String>,
    is_folder: &dyn Fn(&str) -> bool,
    found: &mut Found,
) {
    for name in ["CUDA_HOME", "CUDA_PATH"] {
        if let Some(folder) = set(name).filter(|folder| !is_folder(folder)) {
            found.warn(
                name,
                format!("`{name}` names `{folder}`, which is not a folder"),
                &format!("unset `{name}`, or set it to the folder of the CUDA toolkit"),
            );
        }
    }
    let path = set("LD_LIBRARY_PATH").unwrap_or_default();
    if let Some(stubs) = path.split(':').find(|folder| folder.trim_end_matches('/').ends_with("/stubs")) {
        found.warn(
            "LD_LIBRARY_PATH",
            format!("`LD_LIBRARY_PATH` contains `{stubs}`: a stub is loaded instead of the driver"),
            "remove that folder from `LD_LIBRARY_PATH`",
        );
    }
}

#[cfg(test)]
mod tests {
    use super::super::Verdict;
    use super::*;

    fn line(variables: &[(&str, &str)], wants_gpu: bool) -> Check {
        let read = |name: &str| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        };
        environment_line(&read, &|folder| folder == "/usr/local/cuda", wants_gpu)
    }

    #[test]
    fn leftovers_of_other_trainers_are_named_and_pass() {
        assert_eq!(line(&[], false).finding, "no variable is set that affects smidgen");
        let leftovers = [("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"), ("OMP_NUM_THREADS", "8")];
        let check = line(&[&leftovers[..], &[("CUDA_HOME", "/usr/local/cuda")]].concat(), false);
        assert_eq!(check.verdict, Verdict::Pass, "{check:?}");
        assert_eq!(
            check.finding,
            "no effect on smidgen: `OMP_NUM_THREADS` (`memory.threads` sets the threads)\n\
             no effect on smidgen: `PYTORCH_CUDA_ALLOC_CONF` (the plan allocates all memory)"
        );
        assert_eq!(check.facts["no_effect"], json!(["PYTORCH_CUDA_ALLOC_CONF", "OMP_NUM_THREADS"]));
        let sent = line(&[("HF_HUB_DISABLE_TELEMETRY", "1"), ("TOKENIZERS_PARALLELISM", "false")], false);
        assert_eq!(
            sent.finding,
            "no effect on smidgen: `TOKENIZERS_PARALLELISM` (`memory.threads` sets the threads)\n\
             no effect on smidgen: `HF_HUB_DISABLE_TELEMETRY` (smidgen sends nothing about its use)"
        );
        assert_eq!(sent.verdict, Verdict::Pass);
        let chosen = line(&[("CUDA_VISIBLE_DEVICES", "2,3")], true);
        assert_eq!(chosen.finding, "`CUDA_VISIBLE_DEVICES=2,3`: `cuda:0` is the first of these");
        assert_eq!(chosen.verdict, Verdict::Pass);
    }

    #[test]
    fn what_matters_is_a_warning_with_a_remedy() {
        for (name, value, words) in [
            ("CUDA_VISIBLE_DEVICES", "", "hides every GPU, and the recipe needs one"),
            ("CUDA_VISIBLE_DEVICES", "-1", "hides every GPU"),
            ("NVIDIA_VISIBLE_DEVICES", "void", "hides every GPU"),
            ("CUDA_LAUNCH_BLOCKING", "1", "wait for every kernel"),
            ("NVIDIA_TF32_OVERRIDE", "0", "changes the arithmetic"),
            ("CUDA_HOME", "/nowhere/cuda", "`/nowhere/cuda`, which is not a folder"),
            ("LD_LIBRARY_PATH", "/a:/usr/local/cuda/lib64/stubs/:/b", "a stub is loaded"),
            ("MALLOC_ARENA_MAX", "2", "host memory the process uses"),
            ("LD_PRELOAD", "libjemalloc.so.2", "host memory the process uses"),
            ("WORLD_SIZE", "4", "one of 4 ranks"),
        ] {
            let check = line(&[(name, value)], true);
            assert_eq!(check.verdict, Verdict::Warn, "{name}: {check:?}");
            assert!(check.finding.contains(words), "{name}: {check:?}");
            assert_eq!((check.remedies.len(), &check.facts["matters"]), (1, &json!([name])), "{check:?}");
        }
        for (name, value) in
            [("CUDA_LAUNCH_BLOCKING", "0"), ("WORLD_SIZE", "1"), ("CUDA_VISIBLE_DEVICES", "0")]
        {
            assert_eq!(line(&[(name, value)], true).verdict, Verdict::Pass, "{name}");
        }
    }
}
