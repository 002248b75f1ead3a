//! A final model that is too large for one file: each tensor is in one of several files, and an index says in which,
//! as our loader and the transformers library read it.

use super::*;
use crate::plan::job::Purpose;
use crate::plan::model::model_bytes;
use crate::plan::planning::plan_job;
use serde_json::Value;
use smidgen_ir::Storage;
use smidgen_recipe::{RecipeSource, parse_recipe};
use smidgen_runtime::AnyDevice;
use std::collections::{BTreeMap, BTreeSet};

/// A fixture whose last layer is trained, loaded but not stepped, so that the written values equal the read ones.
fn loaded(case: &str) -> (Job, Executor<AnyDevice>) {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(case);
    let text = "[model]\npath = \"model\"\ncompute = \"f32\"\n[adapter]\nkind = \"full\"\nlayers = \"last:1\"\n\
                [data]\ntrain = \"data.jsonl\"\nformat = \"tokens\"\nmax_tokens = 64\n[train]\nsteps = 1\n\
                [memory]\ndevice = \"cpu\"\nthreads = 1\nbudget = \"64MiB\"\n[output]\ndir = \"run\"\n";
    let source = RecipeSource { file: "recipe.toml".into(), folder: fixture, text: text.into() };
    let recipe = parse_recipe(&source, &[], Path::new("/nowhere")).unwrap();
    let job = Job::prepare(recipe, Purpose::Train).unwrap();
    let plan = plan_job(&job).unwrap().solution.plan;
    let device = job.place.open(1, job.arithmetic).unwrap();
    let mut executor = Executor::load(plan, device).unwrap();
    weights::load_weights(&mut executor, &job.model, 1).unwrap();
    start_trained(&mut executor, &job.request, &job.model).unwrap();
    (job, executor)
}

#[test]
fn a_model_above_the_limit_is_shards_with_an_index() {
    const LIMIT: u64 = 40_000;
    let (job, mut executor) = loaded("llama-bias-linear");
    let folder = tempfile::tempdir().unwrap();
    write_shards(&mut executor, &job, folder.path(), LIMIT).unwrap();
    drop(executor);
    write_beside(&job.model, folder.path()).unwrap();

    let names: Vec<String> = job.request.spec.tensors().into_iter().map(|tensor| tensor.name).collect();
    let index: Value =
        serde_json::from_slice(&std::fs::read(folder.path().join(INDEX_FILE)).unwrap()).unwrap();
    let map: BTreeMap<String, String> = serde_json::from_value(index["weight_map"].clone()).unwrap();
    assert_eq!(map.keys().collect::<BTreeSet<_>>(), names.iter().collect::<BTreeSet<_>>());
    let files: BTreeSet<&String> = map.values().collect();
    assert!(files.len() >= 3, "{files:?}");
    let total = files.len();
    let expected: BTreeSet<String> = (0..total).map(|shard| shard_name(shard, total)).collect();
    assert_eq!(files.into_iter().cloned().collect::<BTreeSet<_>>(), expected);
    assert!(!folder.path().join("model.safetensors").exists());

    let mut bytes = 0;
    for name in &expected {
        let file = SafetensorsFile::open(&folder.path().join(name)).unwrap();
        let own: u64 = file.tensors().iter().map(|tensor| tensor.bytes).sum();
        assert!(own <= LIMIT || file.tensors().len() == 1, "{name} holds {own} bytes");
        assert!(file.tensors().iter().all(|tensor| map[&tensor.name] == *name), "{name}");
        bytes += own;
    }
    assert_eq!(index["metadata"]["total_size"], bytes);

    // Our loader reads the same tensors in the same types, trained or copied.
    let model = Model::open_folder(folder.path()).unwrap();
    for name in &names {
        let (base, written) = (job.model.weight(name).unwrap(), model.weight(name).unwrap());
        assert_eq!((base.shape(), base.element_name()), (written.shape(), written.element_name()), "{name}");
        assert_eq!(job.model.weight_values(name), model.weight_values(name), "{name}");
    }
}

/// Trained tensors are planned in f32, the others as the base stores them. Loading and the solver rely on it.
#[test]
fn trained_tensors_are_counted_in_f32() {
    let (job, _) = loaded("llama-bias-linear");
    assert!(!job.request.trained.is_empty());
    for tensor in job.request.spec.tensors() {
        let expected = if job.request.trained.contains(&tensor.name) {
            Storage::F32
        } else {
            job.model.weight(&tensor.name).unwrap().storage().unwrap()
        };
        assert_eq!(job.request.storage_of(&tensor.name), expected, "{}", tensor.name);
    }
    let frozen = job.request.spec.tensors().into_iter().find(|it| !job.request.trained.contains(&it.name));
    assert_ne!(job.request.storage_of(&frozen.unwrap().name), Storage::F32, "the fixture is not in f32");
}

#[test]
fn a_model_up_to_the_limit_is_one_file() {
    let (job, mut executor) = loaded("llama-bias-linear");
    let folder = tempfile::tempdir().unwrap();
    let whole = model_bytes(&job.request, &job.model);
    write_shards(&mut executor, &job, folder.path(), whole).unwrap();
    let names: Vec<_> =
        std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["model.safetensors"]);
    // With a limit one byte lower, there are two files.
    let folder = tempfile::tempdir().unwrap();
    write_shards(&mut executor, &job, folder.path(), whole - 1).unwrap();
    assert!(folder.path().join(shard_name(1, 2)).exists());
}
