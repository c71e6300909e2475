//! Lists that templates change: `ids.append(id)`, `ids.pop(0)`. transformers refuses this, llama.cpp accepts it.

use std::sync::{Arc, Mutex, PoisonError};

use minijinja::value::{Enumerator, Kwargs, Object, ObjectRepr, Tuple, ValueKind, from_args};
use minijinja::{Error, ErrorKind, Value};

use super::guard::{ITEM, Run};

/// A list that a template can change.
#[derive(Debug)]
struct List(Mutex<Vec<Value>>);

impl List {
    fn with<T>(&self, work: impl FnOnce(&mut Vec<Value>) -> T) -> T {
        work(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Object for List {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        let index = key.as_usize()?;
        self.with(|items| items.get(index).cloned())
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(self.with(|items| items.len()))
    }
}

/// A value whose lists can be changed.
pub(super) fn changeable(value: Value) -> Value {
    let named = |value: &Value| {
        let map = value.as_object().and_then(|map| map.try_iter_pairs()).into_iter().flatten();
        map.map(|(name, value)| (name, changeable(value))).collect::<Vec<_>>()
    };
    match value.kind() {
        ValueKind::Seq if !value.is_tuple() && value.downcast_object_ref::<List>().is_none() => {
            let items = value.try_iter().into_iter().flatten().map(changeable);
            Value::from_object(List(Mutex::new(items.collect())))
        }
        // The named arguments of a call: `namespace(ids=[])`.
        ValueKind::Map if value.is_kwargs() => {
            Value::from(named(&value).into_iter().map(|(k, v)| (k.to_string(), v)).collect::<Kwargs>())
        }
        _ => value,
    }
}

/// An immutable copy. Lists only contain such copies, so that no list can contain itself, and depths are known when a
/// list is created.
fn fixed(value: &Value) -> Value {
    match value.kind() {
        ValueKind::Seq => {
            let items: Vec<Value> = value.try_iter().into_iter().flatten().map(|item| fixed(&item)).collect();
            if value.is_tuple() { Value::from(Tuple::from(items)) } else { Value::from(items) }
        }
        _ => value.clone(),
    }
}

/// Calls a method that changes a list; `None` if `value` is not such a list or has no such method.
pub(super) fn method(run: &Run, value: &Value, name: &str, args: &[Value]) -> Option<Result<Value, Error>> {
    let list = value.downcast_object_ref::<List>()?;
    let known = ["append", "clear", "extend", "insert", "pop"].contains(&name);
    known.then(|| change(run, list, name, args))
}

fn change(run: &Run, list: &List, name: &str, args: &[Value]) -> Result<Value, Error> {
    let put = |value: &Value| {
        run.check_depth(value)?;
        run.take(ITEM)?;
        Ok::<Value, Error>(fixed(value))
    };
    let place = |index: i64, len: usize| match index {
        0.. => usize::try_from(index).ok(),
        _ => usize::try_from(index.unsigned_abs()).ok().and_then(|back| len.checked_sub(back)),
    };
    match name {
        "append" => {
            let (value,): (&Value,) = from_args(args)?;
            let value = put(value)?;
            list.with(|items| items.push(value));
        }
        "extend" => {
            let (values,): (&Value,) = from_args(args)?;
            let values = values.try_iter()?.map(|value| put(&value)).collect::<Result<Vec<_>, _>>()?;
            list.with(|items| items.extend(values));
        }
        "insert" => {
            let (index, value): (i64, &Value) = from_args(args)?;
            let value = put(value)?;
            list.with(|items| {
                let at = place(index, items.len()).unwrap_or(0).min(items.len());
                items.insert(at, value);
            });
        }
        "clear" => {
            let () = from_args(args)?;
            list.with(Vec::clear);
        }
        _ => {
            let (index,): (Option<i64>,) = from_args(args)?;
            return list.with(|items| match place(index.unwrap_or(-1), items.len()) {
                Some(at) if at < items.len() => Ok(items.remove(at)),
                _ => Err(Error::new(ErrorKind::InvalidOperation, "pop: the list has no such element")),
            });
        }
    }
    Ok(Value::from(()))
}
