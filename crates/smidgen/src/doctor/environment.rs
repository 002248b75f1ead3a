//! Environment variables that people set for other trainers: which of them affect smidgen, and which do not.
//!
//! Variables of PyTorch's allocator and of other thread pools are often left over. They have no effect, because the
//! plan allocates all memory and `memory.threads` sets the threads. A variable that hides a GPU, loads another library
//! or slows every kernel launch is a warning with a remedy.
//! Left out: the variables that this program reads itself, such as `HF_HOME` and `SMIDGEN_CACHE`.

use super::{Check, Verdict};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::Path;

/// Variables without effect on smidgen, separated by spaces, and what it uses instead.
const NO_EFFECT: &[(&str, &str)] = &[
    (
        "PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF PYTORCH_HIP_ALLOC_CONF PYTORCH_NO_CUDA_MEMORY_CACHING",
        "the plan allocates all memory",
    ),
    (
        "OMP_NUM_THREADS MKL_NUM_THREADS OPENBLAS_NUM_THREADS NUMEXPR_NUM_THREADS RAYON_NUM_THREADS \
         OMP_PROC_BIND KMP_AFFINITY KMP_BLOCKTIME TOKENIZERS_PARALLELISM",
        "`memory.threads` sets the threads",
    ),
    ("CUBLAS_WORKSPACE_CONFIG", "workspaces are part of the plan"),
    ("TRANSFORMERS_CACHE HF_DATASETS_CACHE", "`HF_HOME` is read"),
    (
        "WANDB_PROJECT WANDB_API_KEY WANDB_MODE WANDB_DISABLED MLFLOW_TRACKING_URI COMET_MODE",
        "a run writes only to its own folder",
    ),
    (
        "HF_HUB_DISABLE_TELEMETRY DISABLE_TELEMETRY DO_NOT_TRACK ANONYMIZED_TELEMETRY \
         UNSLOTH_DISABLE_STATISTICS AXOLOTL_DO_NOT_TRACK",
        "smidgen sends nothing about its use",
    ),
    (
        "ACCELERATE_USE_DEEPSPEED ACCELERATE_USE_FSDP ACCELERATE_MIXED_PRECISION DS_SKIP_CUDA_CHECK",
        "the recipe sets this",
    ),
];

/// The part of a variable's value that makes it matter; the function says whether a folder exists.
type Matters = for<'a> fn(&'a str, &dyn Fn(&str) -> bool) -> Option<&'a str>;

/// Variables that affect smidgen: their names, when they do, the finding and the remedy.
const EFFECTS: &[(&str, Matters, &str, &str)] = &[
    (
        "CUDA_VISIBLE_DEVICES",
        |value, _| (value.is_empty() || HIDES_ALL.contains(&value)).then_some(value),
        "`{name}={value}` hides every GPU{need}",
        "unset `{name}` to train on a GPU",
    ),
    (
        "NVIDIA_VISIBLE_DEVICES",
        |value, _| HIDES_ALL.contains(&value).then_some(value),
        "`{name}={value}` hides every GPU{need}",
        "unset `{name}` to train on a GPU",
    ),
    (
        "CUDA_LAUNCH_BLOCKING",
        |value, _| (!["", "0"].contains(&value)).then_some(value),
        "`{name}` makes the driver wait for every kernel, which slows training down",
        "unset `{name}`",
    ),
    (
        "NVIDIA_TF32_OVERRIDE",
        is_set,
        "`{name}={value}` changes the arithmetic of cuBLAS, so results differ",
        "unset `{name}`",
    ),
    (
        "CUDA_HOME CUDA_PATH",
        |value, is_folder| is_set(value, is_folder).filter(|folder| !is_folder(folder)),
        "`{name}` names `{value}`, which is not a folder",
        "unset `{name}`, or set it to the folder of the CUDA toolkit",
    ),
    (
        "LD_LIBRARY_PATH",
        |value, _| value.split(':').find(|folder| folder.trim_end_matches('/').ends_with("/stubs")),
        "`{name}` contains `{value}`: a stub is loaded instead of the driver",
        "remove that folder from `{name}`",
    ),
    // The C library's allocator: the process uses other memory outside its plan.
    (
        "MALLOC_ARENA_MAX MALLOC_TRIM_THRESHOLD_ MALLOC_MMAP_THRESHOLD_ MALLOC_MMAP_MAX_ MALLOC_TOP_PAD_ \
         GLIBC_TUNABLES LD_PRELOAD",
        is_set,
        "`{name}` changes how much host memory the process uses, which the plan does not know",
        "unset it if a run uses more host memory than its plan",
    ),
    (
        "WORLD_SIZE",
        |value, _| value.parse::<u64>().is_ok_and(|count| count > 1).then_some(value),
        "`{name}={value}`: `smidgen train` would start as one of {value} ranks and wait for the others",
        "unset `WORLD_SIZE` and `RANK` to train with one process",
    ),
];

const HIDES_ALL: [&str; 4] = ["-1", "none", "void", "NoDevFiles"];

fn is_set<'a>(value: &'a str, _: &dyn Fn(&str) -> bool) -> Option<&'a str> {
    Some(value).filter(|value| !value.is_empty())
}

/// Checks the variables of this process.
pub fn check(wants_gpu: bool) -> Check {
    let read = |name: &str| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
    environment_line(&read, &|folder| Path::new(folder).is_dir(), wants_gpu)
}

/// `read` gives a variable, `is_folder` says whether a folder exists.
fn environment_line(
    read: &dyn Fn(&str) -> Option<String>,
    is_folder: &dyn Fn(&str) -> bool,
    wants_gpu: bool,
) -> Check {
    let need = if wants_gpu { ", and the recipe needs one" } else { "" };
    let (mut findings, mut remedies, mut matters) = (Vec::new(), Vec::new(), Vec::new());
    for (names, effect, finding, remedy) in EFFECTS {
        for name in names.split(' ') {
            let Some(value) = read(name) else { continue };
            if let Some(part) = effect(&value, is_folder) {
                let text = finding.replace("{name}", name).replace("{need}", need);
                findings.push(text.replace("{value}", part));
                remedies.push(remedy.replace("{name}", name));
                matters.push(name);
            } else if name == "CUDA_VISIBLE_DEVICES" && value != "0" {
                findings.push(format!("`{name}={value}`: `cuda:0` is the first of these"));
            }
        }
    }
    let is_given = |name: &&str| read(name).is_some_and(|value| !value.is_empty());
    let (mut no_effect, mut unused) = (Vec::new(), BTreeMap::new());
    for (names, why) in NO_EFFECT {
        let given: Vec<&str> = names.split(' ').filter(is_given).collect();
        if !given.is_empty() {
            unused.insert(why, format!("no effect on smidgen: `{}` ({why})", given.join("`, `")));
            no_effect.extend(given);
        }
    }
    findings.extend(unused.into_values());
    if findings.is_empty() {
        findings.push("no variable is set that affects smidgen".to_owned());
    }
    let verdict = if matters.is_empty() { Verdict::Pass } else { Verdict::Warn };
    let facts = json!({"matters": matters, "no_effect": no_effect});
    Check { remedies, ..Check::new("environment", verdict, findings.join("\n")) }.with(facts)
}

#[cfg(test)]
mod tests {
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
