//! How large each room may be, in lines of code: without tests, comments and blank lines.
//!
//! A room that grows fails the test until its number here is raised, with a sentence that says why. A room that shrinks
//! gets its new size. `all crates` is all Rust and the page of reports, without the CUDA kernels.

use super::sites::code;
use super::{is_test_source, project_files, read};

/// A room: its name, the most lines that it may have, its files and folders, and why it has that size.
struct Room {
    name: &'static str,
    most_lines: usize,
    /// Files, and folders with everything in them, below `crates`.
    paths: &'static [&'static str],
    why: &'static str,
}

const ROOMS: [Room; 11] = [
    Room {
        name: "solver",
        most_lines: 2_460,
        paths: &["smidgen-compile/src/solve/"],
        why: "the search schedules few of many policies, so it predicts the others; a list of models is planned with fewer still",
    },
    Room {
        name: "reports",
        most_lines: 4_290,
        paths: &["smidgen/src/report/"],
        why: "plans, runs and their comparison as text, JSON and a page; times are steps, hours and an end; answers that a run generated, and each kind of weight is trained or not",
    },
    Room {
        name: "imports and hints",
        most_lines: 5_530,
        paths: &[
            "smidgen-recipe/src/foreign.rs",
            "smidgen-recipe/src/import/",
            "smidgen-recipe/src/reasons.rs",
            "smidgen-recipe/src/suggest.rs",
        ],
        why: "seven tools have their own names and defaults for what a recipe says, three of them for preferences too",
    },
    Room {
        name: "ranks and comm",
        most_lines: 3_893,
        paths: &[
            "smidgen-compile/src/passes/shard.rs",
            "smidgen-runtime/src/comm/",
            "smidgen-runtime/src/cuda/nccl_watch.rs",
            "smidgen-runtime/src/cuda/peers.rs",
            "smidgen/src/ranks/",
        ],
        why: "NCCL and MPI without their headers, and ranks that notice when another has died",
    },
    Room {
        name: "run logs",
        most_lines: 1_205,
        paths: &["smidgen/src/logs/"],
        why: "three formats, each cut back to a checkpoint when a run resumes, and thinned as it grows; answers with a phase of their own",
    },
    Room {
        name: "doctor and bench",
        most_lines: 2_219,
        paths: &[
            "smidgen/src/bench/",
            "smidgen/src/commands/bench.rs",
            "smidgen/src/commands/doctor.rs",
            "smidgen/src/doctor/",
        ],
        why: "each check has a finding and a remedy, and profiles are measured and fitted",
    },
    Room {
        name: "CUDA launchers",
        most_lines: 5_207,
        paths: &[
            "smidgen-runtime/src/cuda/act.rs",
            "smidgen-runtime/src/cuda/attention.rs",
            "smidgen-runtime/src/cuda/attention_hopper.rs",
            "smidgen-runtime/src/cuda/audio.rs",
            "smidgen-runtime/src/cuda/audio_conv.rs",
            "smidgen-runtime/src/cuda/cached_attention.rs",
            "smidgen-runtime/src/cuda/chunk_attention.rs",
            "smidgen-runtime/src/cuda/columns.rs",
            "smidgen-runtime/src/cuda/decode.rs",
            "smidgen-runtime/src/cuda/early.rs",
            "smidgen-runtime/src/cuda/elementwise.rs",
            "smidgen-runtime/src/cuda/embed.rs",
            "smidgen-runtime/src/cuda/experts.rs",
            "smidgen-runtime/src/cuda/few_rows.rs",
            "smidgen-runtime/src/cuda/fourier.rs",
            "smidgen-runtime/src/cuda/fp8.rs",
            "smidgen-runtime/src/cuda/grouped.rs",
            "smidgen-runtime/src/cuda/head.rs",
            "smidgen-runtime/src/cuda/head_pieces.rs",
            "smidgen-runtime/src/cuda/layer_norm.rs",
            "smidgen-runtime/src/cuda/linear.rs",
            "smidgen-runtime/src/cuda/loss.rs",
            "smidgen-runtime/src/cuda/matmul.rs",
            "smidgen-runtime/src/cuda/norm.rs",
            "smidgen-runtime/src/cuda/objective.rs",
            "smidgen-runtime/src/cuda/operands.rs",
            "smidgen-runtime/src/cuda/optimizer.rs",
            "smidgen-runtime/src/cuda/plain_act.rs",
            "smidgen-runtime/src/cuda/rope.rs",
            "smidgen-runtime/src/cuda/run.rs",
            "smidgen-runtime/src/cuda/spans.rs",
            "smidgen-runtime/src/cuda/stage.rs",
            "smidgen-runtime/src/cuda/thin.rs",
        ],
        why: "a kernel is launched with its own arguments, grid and conditions; routed experts brought sorting and grouped matmuls, objectives weights of rows",
    },
    Room {
        name: "limits for hostile files",
        most_lines: 1_157,
        paths: &[
            "smidgen-data/src/parquet_limits.rs",
            "smidgen-formats/src/json_file.rs",
            "smidgen-formats/src/tokenizer/template_allowance.rs",
            "smidgen-formats/src/tokenizer/template_limits.rs",
            "smidgen-formats/src/tokenizer/template_rewrite.rs",
            "smidgen-formats/src/tokenizer/tokenizer_limits.rs",
        ],
        why: "the libraries that read these formats have no limits of their own",
    },
    Room {
        name: "evaluation",
        most_lines: 1_838,
        paths: &[
            "smidgen/src/commands/eval.rs",
            "smidgen/src/eval/",
            "smidgen/src/rows/answer.rs",
            "smidgen/src/rows/choice.rs",
            "smidgen/src/rows/keys.rs",
            "smidgen/src/rows/question.rs",
            "smidgen/src/rows/score.rs",
        ],
        why: "questions with generated answers, with choices, and with sound",
    },
    Room {
        name: "CPU matmuls and SIMD",
        most_lines: 3_905,
        paths: &[
            "smidgen-runtime/src/cpu/bf16_matmul.rs",
            "smidgen-runtime/src/cpu/bf16_packing.rs",
            "smidgen-runtime/src/cpu/bf16_unit.rs",
            "smidgen-runtime/src/cpu/direct_matmul.rs",
            "smidgen-runtime/src/cpu/gguf_columns.rs",
            "smidgen-runtime/src/cpu/isa.rs",
            "smidgen-runtime/src/cpu/isa_accuracy.rs",
            "smidgen-runtime/src/cpu/isa_lanes.rs",
            "smidgen-runtime/src/cpu/isa_portable.rs",
            "smidgen-runtime/src/cpu/isa_x86.rs",
            "smidgen-runtime/src/cpu/kernel.rs",
            "smidgen-runtime/src/cpu/matmul.rs",
            "smidgen-runtime/src/cpu/matmul_terms.rs",
            "smidgen-runtime/src/cpu/packing.rs",
            "smidgen-runtime/src/cpu/row_matmul.rs",
            "smidgen-runtime/src/cpu/simd.rs",
            "smidgen-runtime/src/cpu/split_matmul.rs",
        ],
        why: "f32, bf16 and stored weights, for many rows and for few, on four instruction sets",
    },
    Room {
        name: "all crates",
        most_lines: 102_700,
        paths: &[""],
        why: "what users have is the sum of the rooms; mixtures of experts with their merges, recurrent layers, objectives, and answers that are generated and scored came in 0.17",
    },
];

/// Whether a path of a room is this file, or a folder above it. Both are below `crates`.
fn is_inside(path: &str, file: &str) -> bool {
    file == path || (path.is_empty() || path.ends_with('/')) && file.starts_with(path)
}

/// Whether a file is in the room with this name.
pub fn is_in_room(name: &str, file: &str) -> bool {
    let room = ROOMS.iter().find(|room| room.name == name).expect("a room with this name");
    let file = file.trim_start_matches("crates/");
    room.paths.iter().any(|path| is_inside(path, file))
}

/// Lines of code of a file of a program. A page's template, style and script count in the room of reports.
fn lines_of_code(path: &str) -> usize {
    let is_code = |line: &str| {
        let line = line.trim();
        !line.is_empty() && !["/*", "{#"].iter().any(|comment| line.starts_with(comment))
    };
    code(&read(path)).filter(|(_, line)| is_code(line)).count()
}

#[test]
fn rooms_are_as_large_as_they_say() {
    let is_program = |path: &&String| {
        let is_page = [".css", ".html", ".js"].iter().any(|ending| path.ends_with(ending));
        path.starts_with("crates/") && path.contains("/src/") && !is_test_source(path) && {
            path.ends_with(".rs") || is_page && path.contains("/report/")
        }
    };
    let files = project_files();
    let sizes: Vec<(&str, usize)> = (files.iter().filter(is_program))
        .map(|path| (path.trim_start_matches("crates/"), lines_of_code(path)))
        .collect();
    let mut listed = String::new();
    let mut is_larger = false;
    for Room { name, most_lines, paths, why } in &ROOMS {
        let mut lines = 0;
        for path in *paths {
            let inside: Vec<usize> =
                sizes.iter().filter(|(file, _)| is_inside(path, file)).map(|(_, size)| *size).collect();
            assert!(!inside.is_empty(), "the room `{name}` has `crates/{path}`, which does not exist");
            lines += inside.iter().sum::<usize>();
        }
        let mark = if lines > *most_lines { "larger" } else { "" };
        is_larger |= lines > *most_lines;
        listed += &format!("  {name:<26}{lines:>7} of {most_lines:>6}  {mark:<7} {why}\n");
    }
    assert!(
        !is_larger,
        "a room is larger than its number: shorten it, or raise the number here and say why\n{listed}"
    );
}
