//! What a user sees of a plan: a table for people, JSON for programs.

pub mod plan_json;
pub mod plan_table;
