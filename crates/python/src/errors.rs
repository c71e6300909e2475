//! Converts the engine's errors to exceptions.

use std::path::Path;

use forebay_engine::Error;
use pyo3::{PyErr, PyResult};

// They are written in Python, so that they have attributes and can be pickled.
mod exceptions {
    pyo3::import_exception!(forebay._errors, BudgetError);
    pyo3::import_exception!(forebay._errors, Cancelled);
    pyo3::import_exception!(forebay._errors, ContextError);
    pyo3::import_exception!(forebay._errors, FileError);
    pyo3::import_exception!(forebay._errors, ForebayError);
    pyo3::import_exception!(forebay._errors, RequestError);
}
use exceptions::{BudgetError, Cancelled, ContextError, FileError, ForebayError, RequestError};

/// What the engine's messages call the options of a library's caller, and the arguments that set them.
const ARGUMENTS: [(&str, &str); 17] = [
    ("Options::device = None", "device=\"cpu\""),
    ("Options::io = IoMethod::Pool", "io=\"pool\""),
    ("Options::expert_memory", "expert_memory="),
    ("Options::layers", "layers="),
    ("Options::memory", "memory="),
    ("Options::context", "context="),
    ("Engine::after", "Model(stages=)"),
    ("Engine::open", "Model without stages"),
    ("Stage::open", "Stage"),
    ("the device's memory limit", "vram="),
    ("Prompter::with_template", "chat_template="),
    ("ServerOptions::keys", "keys="),
    ("ServerOptions::max_body", "max_body="),
    ("ServerOptions::origins", "origins="),
    ("ServerOptions::parallel", "parallel="),
    ("ServerOptions::queue", "queue="),
    ("ServerOptions::timeout", "timeout="),
];

/// A message of the engine, in terms of arguments.
pub fn in_arguments(message: &str) -> String {
    ARGUMENTS.iter().fold(message.to_owned(), |text, (option, argument)| text.replace(option, argument))
}

/// The exception for an error.
pub fn exception(error: Error) -> PyErr {
    about(error, None)
}

/// The exception for a model that cannot be found or downloaded.
pub fn hub_exception(error: forebay_hub::Error, model: Option<&Path>) -> PyErr {
    match error {
        forebay_hub::Error::Engine(error) => exception(error),
        error => FileError::new_err((error.in_full(), model.unwrap_or(Path::new("")).display().to_string())),
    }
}

/// The exception for something that is wrong with the package's own state.
pub fn failure(message: &str) -> PyErr {
    ForebayError::new_err(message.to_owned())
}

/// Checks that this process is the one that loaded a model.
///
/// # Errors
/// If it is a fork of that one, which has none of the threads that compute.
pub fn check_process(loader: u32) -> PyResult<()> {
    if loader == std::process::id() {
        return Ok(());
    }
    Err(failure("the model was loaded by the process that this one was forked from: load it in this process"))
}

fn about(error: Error, field: Option<String>) -> PyErr {
    let message = in_arguments(&error.to_string());
    match error {
        Error::Io { path, .. } | Error::Format { path, .. } => {
            FileError::new_err((message, path.display().to_string()))
        }
        Error::Budget { need, have, .. } => BudgetError::new_err((message, need, have)),
        Error::Context { tokens, limit } => ContextError::new_err((message, tokens, limit)),
        Error::Invalid(_) => RequestError::new_err((message, field)),
        Error::Field { field, error } => match *error {
            // The message names the field.
            Error::Invalid(_) => RequestError::new_err((message, Some(field))),
            error => about(error, Some(field)),
        },
        Error::Cancelled => Cancelled::new_err(message),
        _ => failure(&message),
    }
}
