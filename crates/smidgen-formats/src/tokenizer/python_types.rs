//! What kind of Python value a value of the template engine stands for.
//! A method of a `dict` that a template names is a value of its own here, because a key of the same name is hidden by it.
//! Left out: what the methods do, which is in `python_operators.rs` and in the engine.

use std::sync::Arc;

use minijinja::value::{Enumerator, Object, ObjectRepr, ValueKind};
use minijinja::{Error, State, Value};

/// Whether the engine's type of an object ends in this name.
pub(super) fn is_type(value: &Value, name: &str) -> bool {
    value.as_object().is_some_and(|object| object.type_name().ends_with(name))
}

pub(super) fn is_dict(value: &Value) -> bool {
    let special = ["::Namespace", "::Loop", "::Macro", "::Kwargs"];
    value.kind() == ValueKind::Map && !special.iter().any(|name| is_type(value, name))
}

/// A method of a `dict` that is not called.
#[derive(Debug)]
pub(super) struct Method {
    pub value: Value,
    pub name: String,
}

impl Object for Method {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::NonEnumerable
    }

    fn call(self: &Arc<Self>, state: &mut State<'_, '_>, arguments: &[Value]) -> Result<Value, Error> {
        self.value.call_method(state, &self.name, arguments)
    }
}

/// Whether a value is a method that is not called, which Python prints with its address in memory.
pub(super) fn is_method(value: &Value) -> bool {
    value.downcast_object_ref::<Method>().is_some()
}
