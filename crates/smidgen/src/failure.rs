//! How a command ends when it does not end well: a message, hints, and an exit code.
//!
//! The exit code says whose turn it is: 2 the recipe or the command is wrong, 1 the world (files, data,
//! memory) does not allow it.

use std::fmt;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blame {
    /// The recipe or the command line.
    Recipe,
    /// Files, data, memory, devices.
    World,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    pub blame: Blame,
    pub message: String,
    pub hints: Vec<String>,
}

impl Failure {
    pub fn recipe(message: impl fmt::Display) -> Failure {
        Failure { blame: Blame::Recipe, message: message.to_string(), hints: vec![] }
    }

    pub fn world(message: impl fmt::Display) -> Failure {
        Failure { blame: Blame::World, message: message.to_string(), hints: vec![] }
    }

    pub fn hint(mut self, hint: impl fmt::Display) -> Failure {
        self.hints.push(hint.to_string());
        self
    }

    pub fn exit_code(&self) -> u8 {
        match self.blame {
            Blame::World => 1,
            Blame::Recipe => 2,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "error: {}", self.message)?;
        if !self.hints.is_empty() {
            writeln!(f)?;
        }
        for hint in &self.hints {
            write!(f, "\nhint: {hint}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Failure {}

/// Anything else that failed is the world's doing.
impl From<anyhow::Error> for Failure {
    fn from(error: anyhow::Error) -> Failure {
        Failure::world(format!("{error:#}"))
    }
}
