"""Server of S3 by moto, on loopback, whose requests can fail."""

import os
import threading
from contextlib import contextmanager

KEY, SECRET = "AKIAEXAMPLE7EXAMPLE7", "hunter2-hunter2-hunter2"
_ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": KEY,
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_MAX_ATTEMPTS": "1",  # botocore itself would wait for seconds
}


class Server:
    """Server of S3.

    Attributes
    ----------
    fault : callable
        Function of (method, path and query), which is called before each request, and returns None or a fault: a status
        such as "503 SlowDown"; "cut", which ends the connection inside the body; "half", which sends half of the body;
        "lost", which handles the request, but ends the connection without a reply; or a function of the body that
        returns the body to send.
    requests : list of (str, str)
        Method, and path with query, of each request.
    """

    def __init__(self):
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        self._moto = DomainDispatcherApplication(create_backend_app)
        self.fault, self.requests = (lambda method, path: None), []
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        self.url = f"http://127.0.0.1:{self._server.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def _answer(self, environ, start_response):
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        path += "?" + environ["QUERY_STRING"] if environ["QUERY_STRING"] else ""
        self.requests.append((method, path))
        fault = self.fault(method, path)
        if fault is None:
            return self._moto(environ, start_response)
        if isinstance(fault, str) and fault[0].isdigit():
            environ["wsgi.input"].read()
            code = fault.partition(" ")[2]
            start_response(fault, [("Content-Type", "application/xml")])
            return [f"<Error><Code>{code}</Code><Message>{code} {SECRET}</Message></Error>".encode()]
        found = []
        body = b"".join(self._moto(environ, lambda status, headers, *rest: found.extend((status, headers))))
        if fault == "lost":
            raise ConnectionAbortedError
        length = len(body)
        if callable(fault):
            body = fault(body)
        elif fault in ("cut", "half"):
            body = body[: length // 2]
        if fault != "cut":
            length = len(body)
        names = ("content-length", "x-amz-checksum", "content-range")
        headers = [(name, value) for name, value in found[1] if not name.lower().startswith(names)]
        start_response(found[0], [*headers, ("Content-Length", str(length))])
        return [body]

    def close(self):
        """Stop the server."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextmanager
def s3_server():
    """Start a server of S3 with an empty bucket ``bucket``, which this process and its children then use."""
    import boto3
    import s3fs

    server = Server()
    given = _ENVIRONMENT | {"AWS_ENDPOINT_URL": server.url}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    s3fs.S3FileSystem.clear_instance_cache()  # an instance keeps the address of its server
    boto3.client("s3").create_bucket(Bucket="bucket")
    try:
        yield server
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
        s3fs.S3FileSystem.clear_instance_cache()
        server.close()
