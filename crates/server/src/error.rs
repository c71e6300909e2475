//! Errors for clients.

use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use forebay_engine::Error;
use serde_json::{Value, json};

use crate::options::Words;

/// Tells the clients of OpenAI and Anthropic whether to retry.
const SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");

/// The code of requests that need more memory than the budget allows.
pub const INSUFFICIENT_MEMORY: &str = "insufficient_memory";

/// The code of requests that arrive before the model is loaded.
pub const MODEL_LOADING: &str = "model_loading";

/// An error for a client, and whether a retry makes sense.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ApiError {
    /// The status of a response with this error.
    pub status: StatusCode,
    /// The error's type in OpenAI's API.
    pub kind: &'static str,
    /// The error's code in OpenAI's API, if it has one.
    pub code: Option<&'static str>,
    /// The field of the request that is wrong.
    pub param: Option<String>,
    /// What is wrong, in a sentence.
    pub message: String,
    /// Details that Anthropic's clients evaluate.
    pub details: Option<Box<Value>>,
    /// Whether a retry makes sense.
    pub retry: Retry,
    /// What only the log is told, because it may name files.
    pub(crate) cause: Option<Box<Cause>>,
}

/// A message for the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Cause(String);

/// Whether a retry makes sense.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retry {
    /// The same request fails in the same way.
    Never,
    /// After so many seconds.
    After(u64),
}

/// The API whose form an error has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dress {
    OpenAi,
    Anthropic,
}

impl Dress {
    /// The API that a path belongs to. Some paths belong to both; there, Anthropic's clients are recognised by a header that they
    /// always send.
    pub fn of(path: &str, headers: &HeaderMap) -> Dress {
        let path = path.strip_prefix("/v1").unwrap_or(path);
        let is_own = path == "/messages" || path.starts_with("/messages/");
        if is_own || headers.contains_key("anthropic-version") { Dress::Anthropic } else { Dress::OpenAi }
    }
}

impl ApiError {
    /// A field of the request is wrong.
    pub(crate) fn invalid(param: impl Into<String>, message: impl Into<String>) -> ApiError {
        ApiError { param: Some(param.into()), ..ApiError::bad_request(message) }
    }

    /// The request is wrong.
    pub(crate) fn bad_request(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::BAD_REQUEST, "invalid_request_error", message)
    }

    /// An error that the same request would cause again.
    pub(crate) fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> ApiError {
        let message = message.into();
        ApiError {
            status,
            kind,
            code: None,
            param: None,
            message,
            details: None,
            retry: Retry::Never,
            cause: None,
        }
    }

    /// The address or the model does not exist.
    pub(crate) fn not_found(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::NOT_FOUND, "invalid_request_error", message)
    }

    /// The prompt does not fit into the context.
    pub(crate) fn context(param: &str, tokens: usize, limit: usize) -> ApiError {
        // Clients of both APIs search for these words and then shorten the conversation.
        let message = format!(
            "This model's maximum context length is {limit} tokens. However, the prompt is too long: {tokens} tokens > \
             {limit} maximum."
        );
        ApiError { code: Some("context_length_exceeded"), ..ApiError::invalid(param, message) }
    }

    /// The server cannot answer now.
    pub(crate) fn unavailable(message: impl Into<String>, seconds: u64) -> ApiError {
        let error = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "service_unavailable", message);
        ApiError { retry: Retry::After(seconds), ..error }
    }

    /// The same error, with the advice to retry after so many seconds.
    pub(crate) fn after(self, seconds: u64) -> ApiError {
        ApiError { retry: Retry::After(seconds), ..self }
    }

    /// The answer exceeded the server's time limit.
    pub(crate) fn timeout() -> ApiError {
        let message = "the answer took longer than this server allows (ServerOptions::timeout)";
        let error = ApiError::new(StatusCode::GATEWAY_TIMEOUT, "timeout_error", message);
        ApiError { code: Some("timeout"), ..error }
    }

    /// All places are taken.
    pub(crate) fn overloaded(waiting: usize, seconds: u64) -> ApiError {
        let message = format!("{waiting} requests are running or waiting already: try again later");
        let error = ApiError::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message);
        ApiError { code: Some("rate_limit_exceeded"), retry: Retry::After(seconds), ..error }
    }

    /// The server failed; the log has the reason.
    pub(crate) fn internal(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message)
    }

    /// The error for the log, without the message, which may quote a user's text.
    pub(crate) fn summary(&self) -> String {
        let field = self.param.as_ref().map(|param| format!(" in {param}")).unwrap_or_default();
        format!("{}{field}", self.code.unwrap_or(self.kind))
    }

    /// The error as the program says it. Writes the cause to the log, if there is one.
    pub fn in_words(mut self, words: Words) -> ApiError {
        if let Some(cause) = self.cause.take() {
            tracing::error!("{}", words(&cause.0));
        }
        self.message = words(&self.message);
        self
    }

    /// The body in the form of OpenAI's API.
    pub fn openai(&self) -> Value {
        let ApiError { message, kind, param, code, .. } = self;
        json!({ "error": { "message": message, "type": kind, "param": param, "code": code } })
    }

    /// The same error with the field names of another API.
    pub(crate) fn renamed(mut self, names: &[(&str, &str)]) -> ApiError {
        let is_field = |param: &str, name: &str| {
            param.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
        };
        if let Some(param) = &mut self.param
            && let Some((theirs, ours)) = names.iter().find(|(theirs, _)| is_field(param, theirs))
        {
            *param = param.replacen(theirs, ours, 1);
            self.message = self.message.replace(theirs, ours);
        }
        self
    }

    /// The body in the form of Anthropic's API, which names the field in the message.
    pub(crate) fn anthropic(&self) -> Value {
        let kind = match self.status.as_u16() {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            413 => "request_too_large",
            429 => "rate_limit_error",
            503 => "overloaded_error",
            504 => "timeout_error",
            400..500 => "invalid_request_error",
            _ => "api_error",
        };
        let message = match &self.param {
            Some(param) if !self.message.starts_with(param) => format!("{param}: {}", self.message),
            _ => self.message.clone(),
        };
        let mut error = json!({ "type": kind, "message": message });
        if let Some(details) = &self.details {
            error["details"] = (**details).clone();
        }
        json!({ "type": "error", "error": error })
    }

    /// The response in the form of an API.
    pub(crate) fn response(&self, dress: Dress) -> Response {
        let body = match dress {
            Dress::OpenAi => self.openai(),
            Dress::Anthropic => self.anthropic(),
        };
        let mut response = (self.status, json_type(), body.to_string()).into_response();
        let headers = response.headers_mut();
        match self.retry {
            Retry::Never => headers.insert(SHOULD_RETRY, HeaderValue::from_static("false")),
            Retry::After(seconds) => headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds)),
        };
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

/// The content type of JSON.
pub fn json_type() -> [(HeaderName, HeaderValue); 1] {
    [(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))]
}

impl IntoResponse for ApiError {
    /// In the form of OpenAI's API. The error itself is an extension of the response, so that the router can convert it.
    fn into_response(self) -> Response {
        let mut response = self.response(Dress::OpenAi);
        response.extensions_mut().insert(self);
        response
    }
}

impl ApiError {
    /// Whether the conversation needs more memory than the engine has.
    pub(crate) fn is_budget(&self) -> bool {
        self.status == StatusCode::BAD_REQUEST && self.code == Some(INSUFFICIENT_MEMORY)
    }
}

impl From<Error> for ApiError {
    /// The only place that converts errors of the engine to HTTP errors. Messages that may name files are only for the log.
    fn from(error: Error) -> ApiError {
        let cause = |message| Some(Box::new(Cause(message)));
        match error {
            Error::Field { field, error } => {
                let error = ApiError::from(*error);
                match error.status.is_client_error() {
                    true => ApiError { param: Some(field), ..error },
                    false => error,
                }
            }
            Error::Context { tokens, limit } => ApiError::context("messages", tokens, limit),
            Error::Invalid(message) | Error::Unsupported(message) => ApiError::bad_request(message),
            Error::Budget { .. } => ApiError {
                code: Some(INSUFFICIENT_MEMORY),
                ..ApiError::bad_request(format!("the conversation is too long for this server: it {error}"))
            },
            Error::Cancelled => ApiError::unavailable("the server is shutting down", 30),
            Error::DeviceLost(why) => {
                ApiError { cause: cause(why), ..ApiError::unavailable("the GPU was lost", 30) }
            }
            error => ApiError {
                cause: cause(error.to_string()),
                ..ApiError::internal("the computation failed: see the server's log")
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_the_engine_name_no_paths() {
        let source = std::io::Error::other("gone");
        let error = ApiError::from(Error::io("/home/me/secret.gguf".as_ref(), "cannot read", source));
        assert_eq!(error.status, StatusCode::INTERNAL_SERVER_ERROR);
        assert!(!error.openai().to_string().contains("secret"), "{error:?}");
        let error = ApiError::from(Error::format("/home/me/secret.gguf".as_ref(), "damaged"));
        assert!(!error.anthropic().to_string().contains("secret"), "{error:?}");
    }

    #[test]
    fn a_device_that_is_lost_may_be_back_soon() {
        let error = ApiError::from(Error::DeviceLost("the GPU cannot compute".into()));
        assert_eq!(error.status, StatusCode::SERVICE_UNAVAILABLE);
        let response = error.response(Dress::OpenAi);
        assert!(response.headers().contains_key(header::RETRY_AFTER));
    }

    #[test]
    fn a_context_that_is_too_small_is_told_with_both_numbers() {
        let error = ApiError::from(Error::Context { tokens: 5000, limit: 1024 });
        assert_eq!((error.status.as_u16(), error.code), (400, Some("context_length_exceeded")));
        assert!(error.message.contains("5000") && error.message.contains("1024"), "{error:?}");
        let response = error.into_response();
        assert_eq!(response.headers()["x-should-retry"], "false");
    }

    #[test]
    fn each_api_has_its_own_words() {
        for (path, dress) in [
            ("/v1/messages", Dress::Anthropic),
            ("/messages/count_tokens", Dress::Anthropic),
            ("/v1/messagesx", Dress::OpenAi),
            ("/v1/chat/completions", Dress::OpenAi),
        ] {
            assert_eq!(Dress::of(path, &HeaderMap::new()), dress, "{path}");
        }
        let versioned = HeaderMap::from_iter([(
            HeaderName::from_static("anthropic-version"),
            HeaderValue::from_static("2023-06-01"),
        )]);
        assert_eq!(Dress::of("/v1/models/x", &versioned), Dress::Anthropic);
        let busy = ApiError::overloaded(64, 5);
        assert_eq!(busy.anthropic()["error"]["type"], "rate_limit_error");
        assert_eq!(busy.openai()["error"]["code"], "rate_limit_exceeded");
        assert_eq!(busy.response(Dress::Anthropic).headers()["retry-after"], "5");
    }
}
