//! What the program says, whole: help, tables, the lines of a run. Data on stdout, talk on stderr.
//!
//! Snapshots hold all but speeds, losses and the folder; `UPDATE_EXPECT=1 cargo test` rewrites them.

use crate::scratch::Scratch;
use expect_test::{Expect, expect};
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::process::Stdio;

fn check(scratch: &Scratch, said: &str, expected: Expect) {
    expected.assert_eq(&scratch.neutral(said));
}

#[test]
fn help_lists_the_commands() {
    let scratch = Scratch::new();
    let ended = scratch.run(&["--help"]);
    assert_eq!((ended.code, &*ended.stderr), (Some(0), ""));
    check(
        &scratch,
        &ended.stdout,
        expect![[r#"
            Fine-tuning of large language models in a smidgen of memory

            Usage: smidgen [OPTIONS] <COMMAND>

            Commands:
              plan         Predict memory and speed without starting the run
              fit          Find which models a card can train, or the longest samples,
                           highest rank and largest model for a recipe
              preview      Show samples as the model sees them, with supervised tokens
                           marked
              train        Plan, check that it fits, train, and save the result
              resume       Continue a run from its last checkpoint
              report       Summarize a run, or compare several, as text and as an HTML page
              dash         Serve a live dashboard on localhost
              eval         Score the base model and the trained one on rows with known
                           answers
              merge        Merge an adapter into its base model
              export       Write an adapter or a merged model as a GGUF file for llama.cpp
              inspect      Show the contents of an adapter, a run or a model
              generate     Generate text from a prompt, or chat in the terminal
              serve        Serve a model and adapters with OpenAI's interface, and a page to
                           talk to them
              pull         Download a model or a data set, or show where it is
              bench        Measure speed and memory on random weights of a named shape
              import       Convert another tool's configuration into a recipe
              schema       Print a JSON schema of recipes, for editors that complete and
                           check them
              completions  Write a completion script for a shell
              man          Write manual pages into a folder
              doctor       Check this machine and a recipe, and measure the device for the
                           planner
              help         Print this message or the help of the given subcommand(s)

            Options:
                  --quiet    Print only errors
              -h, --help     Print help
              -V, --version  Print version
        "#]],
    );
    let ended = scratch.run(&["train", "--help"]);
    assert_eq!((ended.code, &*ended.stderr), (Some(0), ""));
    check(
        &scratch,
        &ended.stdout,
        expect![[r#"
            Plan, check that it fits, train, and save the result

            Usage: smidgen train [OPTIONS] <RECIPE> [KEY=VALUE]...

            Arguments:
              <RECIPE>        The recipe, a TOML file; `-` reads it from stdin
              [KEY=VALUE]...  Keys of the recipe to override, as `section.key=value`

            Options:
                  --quiet           Print only errors
                  --resume          Continue the run in the output folder; RECIPE may then
                                    be the folder of the run
                  --accept-changes  Continue even if data, weights, config, tokenizer or
                                    template have changed
                  --ranks <N>       Start this many ranks on this machine: one per GPU, or
                                    CPU ranks with `mpiexec`
                  --json            Print the report as JSON when the run ends, as `report
                                    --json` does
                  --rows            Print every step's row of `metrics.jsonl` as a line of
                                    JSON while the run goes on; if nobody reads them any
                                    more, the run saves its state and ends
              -h, --help            Print help
        "#]],
    );
}

#[test]
fn a_command_that_is_none_is_the_callers_mistake() {
    let scratch = Scratch::new();
    for arguments in [&[][..], &["fine-tune"], &["plan"], &["plan", "recipe.toml", "--json", "--text"]] {
        let ended = scratch.run(arguments);
        assert_eq!((ended.code, &*ended.stdout), (Some(2), ""), "{arguments:?}");
        assert!(!ended.stderr.is_empty(), "{arguments:?}");
    }
}

#[test]
fn plan_prints_the_budget_table() {
    let scratch = Scratch::new();
    let ended = scratch.run(&["plan", "recipe.toml"]);
    assert_eq!((ended.code, &*ended.stderr), (Some(0), ""));
    check(
        &scratch,
        &ended.stdout,
        expect![[r#"
            model · LoRA r=4 · f32 · batch 4 · budget 64.00 MiB · cpu
              base weights      184.50 KiB   f32, as stored
              adapters           22.50 KiB   f32 masters
              gradients          22.50 KiB
              optimizer          45.00 KiB
              activations       399.56 KiB   100 tokens, recompute 0 of 2 layers
              workspace           1.32 MiB
              context            30.58 MiB   process and data 18.58 MiB, margin 12.00 MiB
              peak               32.56 MiB   fits, 31.44 MiB to spare (at: forward, lm_head_loss)

              largest at the peak: workspace of forward, lm_head_loss 1.32 MiB, base weights 184.50 KiB, layers.0.attn.o 25.00 KiB, layers.0.attn.q 25.00 KiB
              recompute: none, all activations fit
              micro-batches: 1 per step, up to 100 tokens
              loss: computed in chunks of 77 tokens
              trained: 5,760 parameters, 16.0 bytes each with gradient and optimizer state
              adapted: attention, feed-forward; frozen: embeddings, norms
              predicted: N ms per step, N tokens/s (the built-in profile `cpu`)
              run: 6 steps, 3 per epoch: N without evaluations and checkpoints
        "#]],
    );
    assert!(!scratch.exists("run"));
}

#[test]
fn plan_without_a_stated_budget_takes_what_is_free() {
    let scratch = Scratch::new();
    let ended = scratch.run(&["plan", "recipe.toml", "memory.budget=auto"]);
    assert_eq!(ended.code, Some(0));
    let title = ended.stdout.lines().next().unwrap();
    check(&scratch, title, expect!["model · LoRA r=4 · f32 · batch 4 · free N GiB · cpu"]);
}

#[test]
fn plan_as_text_lists_leaves_and_steps() {
    let scratch = Scratch::new();
    let ended = scratch.run(&["plan", "recipe.toml", "--text"]);
    assert_eq!((ended.code, &*ended.stderr), (Some(0), ""));
    let head: Vec<&str> = ended.stdout.lines().take(8).collect();
    check(
        &scratch,
        &head.join("\n"),
        expect![[r#"
            plan model · LoRA r=4 · f32 · batch 4
            extent T<=100 S<=77 G<=4
            reserve 2078208 = persistent 285696 + transient 1792512
            leaf @0 base_weights model.embed_tokens.weight f32 (211, 48)
            leaf @40704 base_weights model.layers.0.self_attn.q_proj.weight f32 (64, 48)
            leaf @52992 base_weights model.layers.0.self_attn.k_proj.weight f32 (32, 48)
            leaf @59136 base_weights model.layers.0.self_attn.v_proj.weight f32 (32, 48)
            leaf @65280 base_weights model.layers.0.self_attn.o_proj.weight f32 (48, 64)"#]],
    );
    assert_eq!(ended.stdout, scratch.run(&["plan", "recipe.toml", "--text"]).stdout);
}

#[test]
fn plan_needs_neither_data_nor_weights_and_says_so() {
    let scratch = Scratch::new();
    scratch.write("bare/config.json", scratch.text("model/config.json"));
    let ended = scratch.run(&["plan", "recipe.toml", "model.path=bare", "data.train=absent.jsonl"]);
    assert_eq!((ended.code, &*ended.stderr), (Some(0), ""));
    check(
        &scratch,
        &ended.stdout,
        expect![[r#"
            bare · LoRA r=4 · f32 · batch 4 · budget 64.00 MiB · cpu
              base weights      184.50 KiB   f32, from config.json (weights not downloaded)
              adapters           22.50 KiB   f32 masters
              gradients          22.50 KiB
              optimizer          45.00 KiB
              activations         1.03 MiB   256 tokens, recompute 0 of 2 layers
              workspace           1.47 MiB
              context            30.58 MiB   process and data 18.58 MiB, margin 12.00 MiB
              peak               33.35 MiB   fits, 30.65 MiB to spare (at: forward, lm_head_loss)

              largest at the peak: workspace of forward, lm_head_loss 1.47 MiB, base weights 184.50 KiB, layers.0.attn.o 64.00 KiB, layers.0.attn.q 64.00 KiB
              recompute: none, all activations fit
              micro-batches: 1 per step, up to 256 tokens
              loss: computed in chunks of 252 tokens
              trained: 5,760 parameters, 16.0 bytes each with gradient and optimizer state
              adapted: attention, feed-forward; frozen: embeddings, norms
              predicted: N ms per step, N tokens/s (the built-in profile `cpu`)
              run: 6 steps: 0.0 s without evaluations and checkpoints
              note: planned without data (`data.train`: no file matches `FOLDER/absent.jsonl`): every sample is assumed to have 64 tokens
        "#]],
    );
}

#[test]
fn a_plan_that_does_not_fit_is_shown_and_refused() {
    let scratch = Scratch::new();
    let ended = scratch.run(&["plan", "recipe.toml", "memory.budget=4MiB"]);
    assert_eq!(ended.code, Some(1));
    let verdict = ended.stdout.lines().find(|line| line.starts_with("  peak")).unwrap();
    assert!(verdict.contains("   does not fit, "), "{verdict}");
    check(
        &scratch,
        &ended.stderr,
        expect![[r#"
            error: the smallest plan needs 32.26 MiB, the budget is 4.00 MiB
              largest at the peak: workspace of forward, lm_head_loss 1.28 MiB, base weights 184.50 KiB, layers.1.attn.o 10.00 KiB

            hint: `memory.budget = "33MiB"` is the least that fits
        "#]],
    );
}

#[test]
fn train_talks_on_stderr() {
    let scratch = Scratch::new();
    let ended = scratch.run(&[
        "train",
        "recipe.toml",
        "data.eval=data.jsonl",
        "train.eval_every=4",
        "train.log_every=2",
    ]);
    assert_eq!((ended.code, &*ended.stdout), (Some(0), ""));
    check(
        &scratch,
        &ended.stderr,
        expect![[r#"
            model · LoRA r=4 · f32 · batch 4 · budget 64.00 MiB · cpu
              base weights      184.50 KiB   f32, as stored
              adapters           22.50 KiB   f32 masters
              gradients          22.50 KiB
              optimizer          45.00 KiB
              activations       399.56 KiB   100 tokens, recompute 0 of 2 layers
              workspace           1.32 MiB
              context            30.58 MiB   process and data 18.58 MiB, margin 12.00 MiB
              peak               32.56 MiB   fits, 31.44 MiB to spare (at: forward, lm_head_loss)

              largest at the peak: workspace of forward, lm_head_loss 1.32 MiB, base weights 184.50 KiB, layers.0.attn.o 25.00 KiB, layers.0.attn.q 25.00 KiB
              recompute: none, all activations fit
              micro-batches: 1 per step, up to 100 tokens
              loss: computed in chunks of 77 tokens
              trained: 5,760 parameters, 16.0 bytes each with gradient and optimizer state
              adapted: attention, feed-forward; frozen: embeddings, norms
              predicted: N ms per step, N tokens/s (the built-in profile `cpu`)
              run: 6 steps, 3 per epoch: N without evaluations and checkpoints
              packing: 10 rows in 3 sequences of up to 100 tokens per epoch (73 % full)
            step 1/6  loss X lr 0.00e0 N tok/s mem N/32.56 MiB eta N
            step 2/6  loss X lr 1.00e-2 N tok/s mem N/32.56 MiB eta N
            step 4/6  loss X lr 6.00e-3 N tok/s mem N/32.56 MiB eta N
            step 4/6  eval_loss X, the best so far
            step 6/6  loss X lr 2.00e-3 N tok/s mem N/32.56 MiB
            step 6/6  eval_loss X, the best so far
            memory: N
            report in `FOLDER/run/report.html`
            done: 6 steps, loss X, adapter in `FOLDER/run/adapter`; best eval_loss X in `checkpoint-6`
        "#]],
    );
    let mut names: Vec<String> = std::fs::read_dir(scratch.path("run"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    // Named for the time, the machine and the process.
    assert!(names.remove(3).starts_with("events.out.tfevents."));
    let expected = [
        "adapter",
        "checkpoint-4",
        "checkpoint-6",
        "job.toml",
        "metrics.jsonl",
        "phases.json",
        "plan.json",
        "plan.txt",
        "recipe.toml",
        "report.html",
        "run.json",
    ];
    assert_eq!(names, expected);
    assert_eq!(scratch.text("run/recipe.toml"), scratch.text("recipe.toml"));
    let table = scratch.run(&["plan", "recipe.toml", "data.eval=data.jsonl", "train.eval_every=4"]).stdout;
    let text = scratch.run(&["plan", "recipe.toml", "data.eval=data.jsonl", "train.eval_every=4", "--text"]);
    assert_eq!(scratch.text("run/plan.txt"), format!("{table}\n{}", text.stdout));
}

#[test]
fn the_resolved_job_is_written_whole() {
    let scratch = Scratch::new();
    scratch.train("run", &[]);
    check(
        &scratch,
        &scratch.text("run/job.toml"),
        expect![[r#"
            [model]
            path = "FOLDER/model"
            base = "as-stored"
            compute = "f32"

            [adapter]
            kind = "lora"
            rank = 4
            alpha = 8.0
            dropout = 0.0
            targets = "all-linear"
            layers = "all"
            init = "default"
            train = []
            rank_pattern = {}
            alpha_pattern = {}
            bias = "none"
            reg = 0.01
            sigma = 1.0

            [data]
            train = ["FOLDER/data.jsonl"]
            eval = []
            split = 0.0
            limit = 0
            columns = {}
            on_bad_row = "error"
            format = "tokens"
            template = "auto"
            loss_on = "auto"
            max_tokens = 64
            overflow = "auto"
            max_audio_seconds = 30.0
            audio_overflow = "drop"
            audio_dir = ""
            mix = []
            shuffle = true

            [train]
            objective = "sft"
            batch = 4
            steps = 6
            lr = 0.01
            schedule = "linear"
            warmup = 0.03
            optimizer = "adamw"
            master = "f32"
            weight_decay = 0.0
            betas = [0.9, 0.999]
            eps = 1e-8
            clip = 1.0
            seed = 7
            log_every = 10
            eval_every = 0
            save_every = 100
            keep = 3
            early_stop = 0

            [eval]
            task = "loss"
            limit = 0
            answer = ""

            [memory]
            device = "cpu"
            profile = "auto"
            budget = "64MiB"
            host_budget = "auto"
            threads = 2
            micro_tokens = "auto"
            tile_tokens = "auto"
            recompute = "auto"
            activations = "auto"
            weights = "auto"
            optimizer_state = "auto"
            gradients = "auto"
            order = "auto"
            layers_per_lap = "auto"
            shard = "auto"
            reference = "auto"
            adapt = false

            [expect]
            peak = ""

            [output]
            dir = "FOLDER/run"
        "#]],
    );
    // The job is a recipe: it plans to the same table.
    let again = scratch.run(&["plan", "run/job.toml"]);
    assert_eq!(again.stdout, scratch.run(&["plan", "recipe.toml"]).stdout);
}

#[test]
fn a_folder_that_holds_a_run_is_refused() {
    let scratch = Scratch::new();
    scratch.train("run", &[]);
    let said = scratch.train_refused(1, &[], &[]);
    check(
        &scratch,
        &said,
        expect![[r#"
        error: `FOLDER/run` already holds a run

        hint: `--resume` continues it; choose another `output.dir` to start a new run
    "#]],
    );
    // Also where only a part of a run is left.
    for name in ["adapter", "job.toml", "plan.json", "recipe.toml"] {
        let path = scratch.path("run").join(name);
        if path.is_dir() {
            std::fs::remove_dir_all(path).unwrap()
        } else {
            std::fs::remove_file(path).unwrap()
        }
        scratch.train_refused(1, &[], &["already holds a run"]);
    }
}

#[test]
fn resume_of_a_finished_run_says_so() {
    let scratch = Scratch::new();
    for save_every in ["train.save_every=0", "train.save_every=4"] {
        let output = save_every.replace('=', "-");
        scratch.train(&output, &[save_every]);
        let before = scratch.files();
        let ended = scratch.train(&output, &[save_every, "--resume"]);
        assert_eq!(ended.stdout, "");
        assert_eq!(scratch.neutral(&ended.stderr), format!("the run in `FOLDER/{output}` is finished\n"));
        assert!(scratch.files() == before);
    }
}

#[test]
fn a_run_killed_over_its_page_gets_it_when_it_is_resumed() {
    let scratch = Scratch::new();
    scratch.train("run", &[]);
    let (page, begun) =
        (scratch.path("run").join("report.html"), scratch.path("run").join(".report.html.1-2.tmp"));
    let whole = std::fs::read_to_string(&page).unwrap();
    std::fs::rename(&page, &begun).unwrap();
    let ended = scratch.run(&["train", "recipe.toml", "output.dir=run", "--resume"]);
    assert!(ended.stderr.ends_with("is finished\n"), "{}", ended.stderr);
    assert!(!begun.exists());
    assert_eq!(std::fs::read_to_string(&page).unwrap(), whole);
}

#[test]
fn resume_of_a_run_that_never_began_starts_at_step_0() {
    let scratch = Scratch::new();
    let ended = scratch.run(&["train", "recipe.toml", "--resume"]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(ended.stderr.starts_with("no checkpoint found: starting at step 0\n"), "{}", ended.stderr);
    scratch.train("clean", &[]);
    assert!(scratch.adapter("run") == scratch.adapter("clean"));
}

#[test]
fn quiet_says_nothing() {
    let scratch = Scratch::new();
    // A row without a supervised token is worth a warning, but not here.
    let data = scratch.text("data.jsonl") + "{\"input_ids\":[1,2],\"labels\":[-100,-100]}\n";
    scratch.write("data.jsonl", data);
    let overrides = ["data.eval=data.jsonl", "train.eval_every=3", "train.log_every=1", "--quiet"];
    let ended = scratch.train("run", &overrides);
    assert_eq!((&*ended.stdout, &*ended.stderr), ("", ""));
    let ended = scratch.train("run", &[&overrides[..], &["--resume"]].concat());
    assert_eq!((&*ended.stdout, &*ended.stderr), ("", ""));
    let ended = scratch.run(&["--quiet", "plan", "recipe.toml", "--json"]);
    assert_eq!((ended.code, &*ended.stderr), (Some(0), ""));
    assert!(ended.stdout.starts_with('{'));
}

#[test]
fn a_reader_that_went_away_ends_no_run() {
    let scratch = Scratch::new();
    let mut train = scratch.command(&["train", "recipe.toml", "train.log_every=1"]);
    let mut child = train.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stderr.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.starts_with("model "), "{line}");
    // The pipe is closed with its reader: whatever is said from here on cannot be written.
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert!(scratch.exists("run/adapter"));
    let mut plan = scratch.command(&["plan", "recipe.toml", "--text"]);
    let mut child = plan.stdout(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

/// The command for the reader's own data does not evaluate on the rows of the example.
#[test]
fn a_recipe_from_stdin_is_followed_by_its_rows() {
    let scratch = Scratch::new();
    let with_recipe = |arguments: &[&str]| {
        let recipe = std::fs::File::open(scratch.path("recipe.toml")).unwrap();
        scratch.command(arguments).stdin(recipe).output().unwrap()
    };
    let plan = with_recipe(&["plan", "-", "--json", "--table"]);
    let plan: Value = serde_json::from_slice(&plan.stdout).unwrap();
    assert!(plan["table"].as_str().unwrap().contains("peak"), "{plan}");
    let ended = with_recipe(&["train", "-", "--rows", "--quiet"]);
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    assert_eq!(ended.stdout, scratch.read("run/metrics.jsonl"));
    let several = with_recipe(&["train", "-", "--ranks", "2"]);
    let said = String::from_utf8(several.stderr).unwrap();
    assert_eq!(several.status.code(), Some(2));
    assert!(said.contains("write it into a file"), "{said}");
}

#[test]
fn a_run_whose_rows_nobody_reads_saves_its_state() {
    let scratch = Scratch::new();
    let mut command = scratch.command(&["train", "recipe.toml", "--rows", "train.steps=100000"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut rows = BufReader::new(child.stdout.take().unwrap());
    rows.read_line(&mut String::new()).unwrap();
    drop(rows);
    let ended = child.wait_with_output().unwrap();
    assert_eq!(ended.status.code(), Some(130), "{}", String::from_utf8_lossy(&ended.stderr));
    assert_eq!(scratch.checkpoints("run").len(), 1);
}

#[test]
fn the_readmes_command_for_own_data_evaluates_nothing() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let readme = std::fs::read_to_string(root.join("README.md")).unwrap();
    let command = readme.split("| your own data | `").nth(1).unwrap().split('`').next().unwrap();
    // The shell takes the quotes away.
    let mut words = command.split_whitespace().skip(2);
    let recipe = root.join(words.next().unwrap());
    let overrides: Vec<String> = words.map(|word| word.trim_matches('"').to_owned()).collect();
    let recipe = smidgen_recipe::read_recipe(&recipe, &overrides).unwrap_or_else(|error| panic!("{error}"));
    assert!(recipe.data.eval.is_empty() && recipe.train.eval_every == 0, "{command}");
    assert!(recipe.data.train[0].resolved.ends_with("mine.jsonl"), "{command}");
}
