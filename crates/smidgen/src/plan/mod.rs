//! Recipe to job to plan: what will run, what it needs in every phase of its life, and what would make it fit.
//!
//! `job.rs` reads and checks everything that a run needs; `planning.rs` asks the solver; `life.rs` covers loading,
//! saving, merging and export; `advice.rs` says what would make a run fit. The rest are facts about the machine.
//! Left out: weights and devices at work (`session/`), and words for the user (`report/`).

pub mod advice;
pub mod arithmetic;
pub mod audio;
pub mod budget;
pub mod cgroup;
pub mod context;
pub mod demand;
pub mod devices;
pub mod disk;
pub mod exchange;
pub mod generation;
pub mod host;
pub mod job;
pub mod life;
pub mod model;
pub mod planning;
pub mod processes;
pub mod product;
pub mod profiles;
pub mod terms;
pub mod trained_choice;
pub mod world;
