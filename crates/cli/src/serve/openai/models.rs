//! `/v1/models`: the one model.

use std::sync::Arc;

use axum::extract::{Path, State};
use serde_json::{Value, json};

use crate::serve::app::App;
use crate::serve::body::Json;
use crate::serve::error::ApiError;

/// All models.
pub async fn list(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({ "object": "list", "data": [model(&app)] }))
}

/// One of them, by its name.
pub async fn get(State(app): State<Arc<App>>, Path(id): Path<String>) -> Result<Json<Value>, ApiError> {
    if id == app.model {
        return Ok(Json(model(&app)));
    }
    let message = format!("there is no model {id:?}; this server has {:?}", app.model);
    Err(ApiError {
        code: Some("model_not_found"),
        param: Some("model".into()),
        ..ApiError::not_found(message)
    })
}

fn model(app: &App) -> Value {
    let mut model = json!({
        "id": app.model, "object": "model", "created": app.created, "owned_by": "forebay",
    });
    if let Ok(loaded) = app.loaded() {
        model["context_length"] = loaded.engine.context().into();
        model["max_model_len"] = loaded.engine.context().into();
    }
    model
}
