//! Configurations of other tools in `fixtures/import`: the notes about each, and that its recipe plans.
//! `UPDATE_EXPECT=1 cargo test -p smidgen --test it importing` rewrites the expected notes.
//! Left out: the recipes themselves (`smidgen-recipe/tests/it/import.rs`).

use expect_test::expect_file;
use smidgen::internal::{Job, Purpose, fold, plan_job};
use smidgen_compile::error::ModelError;
use smidgen_compile::model::read_spec;
use smidgen_formats::peft::{AdapterConfig, FourierConfig};
use smidgen_ir::{LeafKind, Space};
use smidgen_recipe::import::draft::Places;
use smidgen_recipe::import::families::{FAMILIES, Kind, family_of};
use smidgen_recipe::import::render::{render_notes, render_recipe};
use smidgen_recipe::import::{Imported, import};
use smidgen_recipe::{AdapterKind, RecipeSource, parse_recipe};
use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// Every configuration with its text, sorted by name.
fn configurations() -> Vec<(String, String)> {
    let paths = fs::read_dir(root().join("fixtures/import")).unwrap().map(|entry| entry.unwrap().path());
    let is_configuration = |path: &PathBuf| path.extension().is_some_and(|it| it == "json" || it == "yaml");
    let mut files: Vec<PathBuf> = paths.filter(is_configuration).collect();
    files.sort();
    let name = |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().to_owned();
    files.iter().map(|path| (name(path), fs::read_to_string(path).unwrap())).collect()
}

/// The model types that load, as the compiler lists them in its error.
fn supported() -> Vec<String> {
    match read_spec(&serde_json::json!({ "model_type": "unknown" })) {
        Err(ModelError::UnknownArchitecture { supported, .. }) => {
            supported.split(", ").map(str::to_owned).collect()
        }
        other => panic!("{other:?}"),
    }
}

/// Only the files of `fixtures/import` are found from there.
fn imported(text: &str, overrides: &[&str]) -> Imported {
    let places = Places {
        working_directory: "/nowhere".into(),
        file_folder: root().join("fixtures/import"),
        recipe_folder: "/nowhere".into(),
        ..Places::default()
    };
    let overrides: Vec<String> = overrides.iter().map(|text| (*text).to_owned()).collect();
    let mut imported = import(text, None, &overrides, places).unwrap_or_else(|error| panic!("{error}"));
    imported.warn_of_families(|model_type| supported().iter().any(|known| known == model_type));
    imported
}

/// What `train` writes next to an adapter's tensors.
#[test]
fn an_adapter_config_of_ours_is_read_back() {
    let targets = ["q_proj".to_owned(), "v_proj".to_owned()];
    let fourier = Some(FourierConfig { reg_weight: 0.25, init_sigma: 3.0 });
    let config = AdapterConfig { fourier, ..AdapterConfig::new(4, 12.0, &targets) };
    let recipe = render_recipe(&imported(&config.to_json(), &[]), "adapter_config.json");
    for line in ["kind = \"ls-lora\"", "rank = 4 ", "alpha = 12 ", "reg = 0.25", "sigma = 3 "] {
        assert!(recipe.contains(line), "{line}: {recipe}");
    }
    let plain = AdapterConfig { use_dora: true, ..AdapterConfig::new(4, 12.0, &targets) };
    let recipe = render_recipe(&imported(&plain.to_json(), &[]), "adapter_config.json");
    assert!(recipe.contains("kind = \"dora\"") && !recipe.contains("sigma"), "{recipe}");
}

#[test]
fn every_configuration_has_its_notes() {
    for (name, text) in &configurations() {
        let notes = fold(&render_notes(&imported(text, &[]), name), 80);
        assert!(notes.lines().all(|line| line.chars().count() <= 80), "{name}: {notes}");
        let stem = name.split('.').next().unwrap();
        let file = root().join("fixtures/import").join(format!("{stem}.notes.txt"));
        expect_file![file].assert_eq(&(notes + "\n"));
    }
}

/// With the missing keys given, in the shape of its model.
#[test]
fn every_recipe_plans() {
    let (mut full, mut offloaded, mut full_offloaded) = (0, 0, 0);
    for (name, text) in &configurations() {
        let named = imported(text, &[]);
        let shape = |name: &str| root().join("recipes/shapes").join(name);
        let model = named.draft.line("model.path").map_or_else(String::new, |line| {
            line.toml.trim_matches('"').trim_end_matches('/').rsplit('/').next().unwrap().to_lowercase()
        });
        let model = if model.is_empty() || !shape(&model).exists() {
            "qwen2.5-0.5b-instruct".to_owned()
        } else {
            model
        };
        let model = format!("model.path={}", shape(&model).display());
        // A GPU of this size, as these files expect; the machine of the test has none.
        let given = [
            &model,
            "data.train=rows.jsonl",
            "output.dir=runs/x",
            "memory.budget=128GiB",
            "memory.profile=h200",
            "memory.threads=2",
        ];
        let imported = imported(text, &given);
        assert_eq!(imported.missing, [], "{name}");
        let source = RecipeSource {
            file: name.clone(),
            folder: "/nowhere".into(),
            text: render_recipe(&imported, name),
        };
        let recipe =
            parse_recipe(&source, &[], Path::new("/nowhere")).unwrap_or_else(|error| panic!("{error}"));
        let is_full = recipe.adapter.kind == AdapterKind::Full;
        let trains_base = is_full || !recipe.adapter.train.is_empty();
        let memory = recipe.memory.clone();
        let job = Job::prepare(recipe, Purpose::Plan).unwrap_or_else(|failure| panic!("{name}: {failure}"));
        assert_eq!(trains_base, !job.request.trained.is_empty(), "{name}");
        let planned = plan_job(&job).unwrap_or_else(|failure| panic!("{name}: {failure}"));
        assert!(planned.fits, "{name}: {}", planned.refusal());
        full += usize::from(is_full);
        // What the file offloads is offloaded.
        let plan = &planned.solution.plan;
        let offloads = |kind: LeafKind| {
            let mut buffers = plan.leaves(kind).filter_map(|(_, value)| value.buffer);
            buffers.any(|id| plan.buffers[id.index()].space != Space::Device)
        };
        if memory.pins.weights == Some(Space::Host) {
            // Trained weights are leaves like those of an adapter.
            let weights = if is_full { LeafKind::Adapter } else { LeafKind::Weight };
            assert!(offloads(weights), "{name}: weights");
            full_offloaded += usize::from(is_full);
        }
        if memory.pins.optimizer_state == Some(Space::Host) {
            assert!(offloads(LeafKind::Moment), "{name}: moments");
            offloaded += 1;
        }
    }
    // The list covers both kinds of training, offloading, and weights that are trained and offloaded.
    assert!(full >= 2 && offloaded >= 2 && full_offloaded >= 1, "{full} {offloaded} {full_offloaded}");
}

/// The table of families that an import goes by, against the models that load.
#[test]
fn families_load_what_they_say() {
    for (name, folder) in [
        ("org/Llama-3.1-8B", "llama-3.1-8b-instruct"),
        ("org/Phi-3-mini", "phi-3-mini-4k-instruct"),
        ("org/Phi-4-multimodal", "phi-4-multimodal-instruct"),
        ("org/Qwen2.5-0.5B", "qwen2.5-0.5b-instruct"),
        ("org/SmolLM2-135M", "smollm2-135m"),
    ] {
        let config =
            fs::read_to_string(root().join("recipes/shapes").join(folder).join("config.json")).unwrap();
        let config: serde_json::Value = serde_json::from_str(&config).unwrap();
        assert!(read_spec(&config).is_ok(), "{folder}");
        let text = format!("base_model: {name}\nadapter: lora\nmicro_batch_size: 1\n");
        assert_eq!(imported(&text, &[]).draft.warnings, [] as [&str; 0], "{name}");
    }
}

/// The table of families knows no list of its own of what loads; a family that loads must have a row that names show.
#[test]
fn every_family_that_loads_has_a_row() {
    let supported = supported();
    assert!(supported.len() >= 9, "{supported:?}");
    for model_type in &supported {
        let has_row =
            FAMILIES.iter().any(|family| matches!(family.kind, Kind::Type(known) if known == model_type));
        assert!(has_row, "`{model_type}` loads; give it a row in `smidgen-recipe/src/import/families.rs`");
    }
    for name in ["tiiuae/falcon-7b", "openai/gpt-oss-20b", "meta-llama/Llama-4-Scout-17B-16E", "a/x-GPTQ"] {
        let text = format!("base_model: {name}\nadapter: lora\nmicro_batch_size: 1\n");
        let loads = matches!(family_of(name).unwrap().kind, Kind::Type(known) if supported.iter().any(|it| it == known));
        assert_eq!(imported(&text, &[]).draft.warnings.is_empty(), loads, "{name}");
    }
}
