import socket

from cpt.demo.answer import USUAL_PORT, free_port


def test_the_usual_port_is_taken_where_it_is_free_and_another_where_not():
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", USUAL_PORT))
        except OSError:
            pass  # somebody else has it: as good
        else:
            listener.listen()
        assert free_port() not in (0, USUAL_PORT)
