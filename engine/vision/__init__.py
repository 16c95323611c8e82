"""What is done with pictures before the text has them. Processors resize them, where they are decoded; towers look at
them, on the device.

processor: from a decoded picture to the pixels, the tokens and the key of its item
qwen_processor: the image processor of Qwen's models
pixtral_processor: the image processor of Mistral 3 and Pixtral
tile_processor: image processors that make squares of one size, of InternVL and LLaVA
processors: which processor a model's pictures pass, and its way to other processes

positions: where the tokens of a prompt with pictures are, in time, height and width
tower: the blocks of towers, and what is around them
qwen: the towers of Qwen2-VL, 2.5-VL and 3-VL, and of Qwen 3.5
pixtral: the tower of Mistral 3 and Pixtral
tiles: towers that look at squares of one size, of InternVL and LLaVA
towers: which tower a model has
"""
