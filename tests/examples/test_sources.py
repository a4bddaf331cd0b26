import http.server
import json
import threading

from cpt.data.readers.sources import open_source
from cpt.recipe.schema import Source


def texts_of(path, **options):
    return [document.text for document in open_source(Source(path=path, options=options), "data.sources[0]")]


def test_prices_become_documents_of_changes(tmp_path):
    (tmp_path / "A.csv").write_text("Date,Close\n2024-01-02,100\n2024-01-03,101\n2024-01-04,50\n2024-01-05,60\n")
    texts = texts_of("examples.sources.prices:prices", folder=str(tmp_path), symbols=["A"], until="2024-01-04")
    assert texts == ["A 2024-01-02 2024-01-04\n10 -200"]


def test_a_service_is_read_page_by_page():
    pages = {"/1": {"data": [{"text": "a"}, {"text": "b"}], "next": "/2"}, "/2": {"data": [{"text": "c"}]}}

    class Service(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(pages[self.path]).encode())

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Service) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/1"
        texts = texts_of("examples.sources.http_api:pages", url=url, items="data", next_page="next")
        server.shutdown()
    assert texts == ["a", "b", "c"]
