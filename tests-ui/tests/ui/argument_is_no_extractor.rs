// A `String` cannot be taken from a delivery; `Json<String>` or `Payload` can.

async fn handle(text: String) {
    drop(text);
}

fn main() {
    anymq::worker::handler::check::<(String,), (), _>(&handle);
}
