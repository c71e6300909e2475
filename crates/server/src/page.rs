//! The chat page at `/`. Its files are part of the program, and it sends requests only to this server.

use std::sync::Arc;

use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get};
use forebay_engine::internals::hash::Fnv;

use crate::app::App;
use crate::live;

/// The page may run its own scripts and send requests to this server. The browser loads nothing else, whatever a model writes.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";

struct File {
    path: &'static str,
    kind: &'static str,
    text: &'static str,
}

static FILES: [File; 11] = [
    File { path: "/", kind: HTML, text: include_str!("page/index.html") },
    File { path: "/page/style.css", kind: CSS, text: include_str!("page/style.css") },
    File { path: "/page/icon.svg", kind: "image/svg+xml", text: include_str!("page/icon.svg") },
    File { path: "/page/app.js", kind: SCRIPT, text: include_str!("page/app.js") },
    File { path: "/page/api.js", kind: SCRIPT, text: include_str!("page/api.js") },
    File { path: "/page/chat.js", kind: SCRIPT, text: include_str!("page/chat.js") },
    File { path: "/page/heatmap.js", kind: SCRIPT, text: include_str!("page/heatmap.js") },
    File { path: "/page/machine.js", kind: SCRIPT, text: include_str!("page/machine.js") },
    File { path: "/page/markdown.js", kind: SCRIPT, text: include_str!("page/markdown.js") },
    File { path: "/page/server.js", kind: SCRIPT, text: include_str!("page/server.js") },
    File { path: "/page/store.js", kind: SCRIPT, text: include_str!("page/store.js") },
];

/// The page's addresses.
pub fn routes() -> Vec<(&'static str, MethodRouter<Arc<App>>)> {
    let file = |file: &'static File| {
        (file.path, get(move |headers: HeaderMap| async move { file.response(&headers) }))
    };
    FILES.iter().map(file).chain([("/live", get(live::live))]).collect()
}

/// Whether a path is a file of the page. These files need no key: the page must be loaded before it can ask for one.
pub fn is_file(path: &str) -> bool {
    FILES.iter().any(|file| file.path == path)
}

impl File {
    /// The file, or 304 if the browser has it already.
    fn response(&self, asked: &HeaderMap) -> Response {
        let tag = format!("\"{:016x}\"", Fnv::of(self.text.as_bytes()));
        let known = asked.get(header::IF_NONE_MATCH).and_then(|tags| tags.to_str().ok());
        let mut response = match known {
            Some(tags) if tags.split(',').any(|known| known.trim() == tag) => {
                StatusCode::NOT_MODIFIED.into_response()
            }
            _ => self.text.into_response(),
        };
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(self.kind));
        // The browser notices a new version of the program at once.
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
        headers.insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY));
        headers.insert(header::REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
        if let Ok(tag) = HeaderValue::from_str(&tag) {
            headers.insert(header::ETAG, tag);
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_names_no_file_that_is_not_there_and_no_other_server() {
        let mut named = 0;
        for file in &FILES {
            // File names are between quotes: "/page/x" in HTML, './x.js' in scripts.
            for quoted in file.text.split(['"', '\'']).filter(|text| !text.contains(char::is_whitespace)) {
                let path = match quoted.strip_prefix("./") {
                    Some(script) => format!("/page/{script}"),
                    None => quoted.to_owned(),
                };
                if path.starts_with("/page/") {
                    assert!(is_file(&path), "{} names {path}", file.path);
                    named += 1;
                }
            }
            let text = file.text.replace("http://www.w3.org/2000/svg", "");
            for other in ["src=\"http", "href=\"http", "url(", "@import", "fetch('http", "//cdn"] {
                assert!(!text.contains(other), "{} has {other}", file.path);
            }
            assert!(!text.contains("innerHTML"), "{}", file.path);
        }
        assert!(named >= FILES.len());
        assert!(!is_file("/live") && !is_file("/page/") && is_file("/"));
    }

    #[test]
    fn the_page_is_small() {
        let bytes: usize = FILES.iter().map(|file| file.text.len()).sum();
        assert!(bytes < 120_000, "{bytes} bytes");
    }

    #[test]
    fn a_file_that_the_browser_has_is_not_sent_again() {
        let first = FILES[0].response(&HeaderMap::new());
        assert_eq!(first.status(), StatusCode::OK);
        assert_eq!(first.headers()[header::CONTENT_TYPE], HTML);
        assert!(
            first.headers()[header::CONTENT_SECURITY_POLICY].to_str().unwrap().contains("default-src 'none'")
        );
        let mut headers = HeaderMap::new();
        headers.insert(header::IF_NONE_MATCH, first.headers()[header::ETAG].clone());
        assert_eq!(FILES[0].response(&headers).status(), StatusCode::NOT_MODIFIED);
        assert_eq!(FILES[1].response(&headers).status(), StatusCode::OK);
    }
}
