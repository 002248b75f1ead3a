//! Recipe to job to plan: what will run, the memory of every phase of the run, and what would make it fit.
//!
//! `job.rs` reads and checks everything that a run needs; `conditions.rs` collects the conditions that a plan must meet;
//! `planning.rs` calls the solver; `phases.rs` adds loading, saving, merging and export; `advice.rs` finds changes that
//! would make a run fit. The other files compute one input of these each, such as the budget or the device profile.
//! Left out: executing a plan (`session/`), and showing it to the user (`report/`).

pub mod advice;
pub mod arithmetic;
pub mod artifact;
pub mod audio;
pub mod budget;
pub mod conditions;
pub mod context;
pub mod demand;
pub mod devices;
pub mod disk;
pub mod exchange;
pub mod facts;
pub mod generation;
pub mod job;
pub mod missing;
pub mod model;
pub mod phases;
pub mod planning;
pub mod profiles;
pub mod rank_layout;
pub mod shapes;
pub mod trained_choice;
pub mod weight_kinds;
