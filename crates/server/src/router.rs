//! The addresses of the server, and the checks that all requests pass.

use std::sync::{Arc, LazyLock};
use std::time::Instant;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get, post};

use crate::app::{App, leaving};
use crate::body::discard;
use crate::error::{ApiError, Dress};
use crate::guard::Caller;
use crate::memory::{Account, holding};
use crate::openai::{chat, completions, models, responses};
use crate::{anthropic, info, openapi, page};

/// All addresses. Those that begin with `/v1` also exist without this prefix.
pub fn routes() -> Vec<(&'static str, MethodRouter<Arc<App>>)> {
    vec![
        ("/v1/chat/completions", post(chat::chat)),
        ("/v1/completions", post(completions::completions)),
        ("/v1/responses", post(responses::responses)),
        ("/v1/messages", post(anthropic::messages)),
        ("/v1/messages/count_tokens", post(anthropic::count_tokens)),
        ("/v1/models", get(models::list)),
        ("/v1/models/{*id}", get(models::get)),
        ("/tokenize", post(info::tokenize)),
        ("/detokenize", post(info::detokenize)),
        ("/apply-template", post(info::apply_template)),
        ("/health", get(info::health)),
        ("/ready", get(info::ready)),
        ("/metrics", get(info::metrics)),
        ("/props", get(info::props)),
        ("/openapi.json", get(openapi::document)),
    ]
}

/// Addresses that need no key, in addition to the page's files.
const OPEN: [&str; 1] = ["/health"];

/// Addresses that respond before the model is loaded and during shutdown.
const ALWAYS: [&str; 4] = ["/health", "/ready", "/metrics", "/openapi.json"];

/// The paths of the routes.
static KNOWN: LazyLock<Vec<&str>> = LazyLock::new(|| routes().into_iter().map(|(path, _)| path).collect());

/// The router of all addresses.
pub fn router(app: Arc<App>) -> Router {
    let mut router = Router::new();
    for (path, method) in routes() {
        if let Some(short) = path.strip_prefix("/v1") {
            router = router.route(short, method.clone());
        }
        router = router.route(path, method);
    }
    for (path, method) in page::routes() {
        router = router.route(path, method);
    }
    router
        .fallback(|request: Request| async move {
            let message =
                format!("{} does not exist; /openapi.json lists all addresses", request.uri().path());
            ApiError { code: Some("unknown_url"), ..ApiError::not_found(message) }
        })
        .method_not_allowed_fallback(|request: Request| async move {
            let message = format!("{} does not support {}", request.uri().path(), request.method());
            ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "invalid_request_error", message)
        })
        .layer(middleware::from_fn_with_state(Arc::clone(&app), attend))
        .with_state(app)
}

/// Wraps every request: checks access, converts errors to the form of the API, and writes the log.
async fn attend(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let start = Instant::now();
    let method = request.method().clone();
    let path = request.uri().path().to_owned();
    let dress = Dress::of(&path, request.headers());
    let known = KNOWN.iter().copied().find(|known| matches(known, &path));
    let mut allowed = None;
    let caller: Option<&Caller> = request.extensions().get();
    let caller = *caller.expect("whoever passes a request on says whom it is of");
    let admitted = app.hosts.check(named(&request).filter(|_| caller.checks_names)).and_then(|()| {
        if caller.checks_names {
            allowed = app.origins.check(request.headers())?;
        }
        if allowed.is_some() && is_preflight(&method, request.headers()) {
            return Ok(Some(preflight(request.headers())));
        }
        if caller.checks_keys && !OPEN.contains(&path.as_str()) && !page::is_file(&path) {
            app.keys.check(request.headers())?;
        }
        if known.is_some_and(|known| !ALWAYS.contains(&known)) {
            if app.is_draining() {
                return Err(leaving());
            }
            app.loaded()?;
        }
        Ok(None)
    });
    let mut response = match admitted {
        Ok(None) => {
            let client = app.keys.client(request.headers(), caller.peer);
            request.extensions_mut().insert(client);
            let account = Account::new();
            let response = Arc::clone(&account).scope(next.run(request)).await;
            response.map(|body| holding(body, account))
        }
        Ok(Some(response)) => response,
        Err(error) => {
            discard(&mut request.into_body()).await;
            error.into_response()
        }
    };
    let status = response.status();
    app.meters.request(known.unwrap_or("other"), status.as_u16());
    let seconds = start.elapsed().as_secs_f64();
    match response.extensions_mut().remove::<ApiError>() {
        Some(error) => {
            let error = error.in_words(app.words);
            tracing::info!("{method} {path}: {} after {seconds:.3} s: {}", status.as_u16(), error.summary());
            tracing::debug!("{method} {path}: {}", loggable(&error.message));
            response = error.response(dress);
        }
        None => tracing::debug!("{method} {path}: {} after {seconds:.3} s", status.as_u16()),
    }
    let headers = response.headers_mut();
    if let Ok(id) = HeaderValue::from_str(&crate::app::id("req_")) {
        headers.insert("x-request-id", id.clone());
        headers.insert("request-id", id);
    }
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    if let Some(origin) = allowed {
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        headers.insert(header::VARY, HeaderValue::from_static("origin"));
    }
    response
}

/// A message on one line and not too long. It may quote the request, so it is logged only at the level `debug`.
fn loggable(message: &str) -> String {
    message.chars().take(400).map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// Whether a path belongs to a route.
fn matches(route: &str, path: &str) -> bool {
    let is = |route: &str| match route.split_once("{*") {
        Some((start, _)) => path.len() > start.len() && path.starts_with(start),
        None => path == route,
    };
    is(route) || route.strip_prefix("/v1").is_some_and(is)
}

/// The host names in a request: in its `Host` headers and in its first line.
fn named(request: &Request) -> impl Iterator<Item = &[u8]> {
    let line = request.uri().authority().map(|authority| authority.as_str().as_bytes());
    request.headers().get_all(header::HOST).iter().map(HeaderValue::as_bytes).chain(line)
}

/// Whether a request is a CORS preflight.
fn is_preflight(method: &Method, headers: &HeaderMap) -> bool {
    *method == Method::OPTIONS && headers.contains_key(header::ACCESS_CONTROL_REQUEST_METHOD)
}

fn preflight(asked: &HeaderMap) -> Response {
    let mut response = StatusCode::NO_CONTENT.into_response();
    let headers = response.headers_mut();
    headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST, OPTIONS"));
    let any = HeaderValue::from_static("authorization, content-type, x-api-key");
    let wanted = asked.get(header::ACCESS_CONTROL_REQUEST_HEADERS).cloned().unwrap_or(any);
    headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, wanted);
    headers.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("600"));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_description_names_every_route_and_no_other() {
        let described = openapi::paths();
        let routed: Vec<_> = routes().into_iter().map(|(path, _)| path.replace("{*id}", "{id}")).collect();
        assert_eq!(described, routed);
    }

    #[test]
    fn paths_are_known_with_and_without_their_version() {
        assert!(matches("/v1/models", "/models") && matches("/v1/models", "/v1/models"));
        assert!(matches("/v1/models/{*id}", "/models/a/b") && !matches("/v1/models/{*id}", "/v1/models/"));
        assert!(!matches("/health", "/v1/health"));
    }
}
