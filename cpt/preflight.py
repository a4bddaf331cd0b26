def refuse_mistakes(recipe):
    pass
